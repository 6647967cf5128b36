"""What the demo plays says what it is, and is the same each time."""

from pathlib import Path

import pytest

from engine_bridge.errors import MalformedTrace
from engine_bridge.sim.traces.calls import ChangeKind
from proxy.demo.workload import demo_workload
from tests.proxy.demo.small import CAPS, GAP_SECONDS, workload


def test_a_generated_workload_is_cut_as_it_says() -> None:
    made = workload()
    assert made == workload()
    assert f"{len(made.calls)} calls" in made.told
    assert all(call.num_tokens <= CAPS.num_list_tokens for call in made.calls)
    assert all((call.gap_seconds or 0) <= GAP_SECONDS for call in made.calls)


def test_there_is_something_to_free_and_something_to_keep_out() -> None:
    changes = [change.kind for call in workload().calls for change in call.before]
    assert ChangeKind.REPLACE in changes
    assert ChangeKind.ONE_OFF in changes


def test_the_working_set_is_what_agents_come_back_for() -> None:
    made = workload()
    lists: dict[tuple[int, int], int] = {}
    for call in made.calls:
        if not call.is_one_off:
            at = (call.session, call.context)
            lists[at] = max(lists.get(at, 0), call.num_tokens)
    assert made.working_tokens == sum(lists.values())


def test_what_is_not_a_trace_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("hello\n")
    with pytest.raises(MalformedTrace, match=r"notes\.jsonl"):
        demo_workload(path, CAPS, GAP_SECONDS, 1)
