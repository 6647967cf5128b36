"""A trace cut to size is a trace: within its limits, its changes true, nothing cut that need not be."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.sim.traces.calls import Call, Change, ChangeKind, Message, changes_between, shared_prefix
from engine_bridge.sim.traces.generated import Workload, generated
from engine_bridge.sim.traces.selection import Caps, capped
from tests.engine_bridge.sim.trace_files import workloads

caps = st.builds(
    Caps,
    num_sessions=st.integers(1, 5),
    num_session_calls=st.integers(1, 40),
    num_calls=st.integers(1, 100),
    num_list_tokens=st.integers(1, 1500),
    num_new_tokens=st.integers(1, 10_000),
    num_answer_tokens=st.integers(1, 30),
)
ENOUGH = Caps(num_calls=10**6, num_list_tokens=10**6, num_new_tokens=10**9, num_answer_tokens=10**6)


@given(workloads(), caps)
@settings(max_examples=40)
def test_every_limit_holds_and_every_change_is_true(workload: Workload, caps: Caps) -> None:
    originals = {(call.session, call.index): call for call in generated(workload)}
    left = list(capped(generated(workload), caps))
    assert len(left) <= caps.num_calls
    assert len({call.session for call in left}) <= caps.num_sessions
    ends: dict[tuple[int, int], tuple[Message, ...]] = {}
    sent: set[tuple[int, tuple[str, ...]]] = set()
    new_tokens = 0
    for call in left:
        original = originals[call.session, call.index]
        mine = [each for each in left if each.session == call.session]
        assert len(mine) <= caps.num_session_calls
        assert call.messages
        assert call.num_tokens <= caps.num_list_tokens
        assert call.num_generated <= caps.num_answer_tokens
        assert is_subsequence([m.id for m in call.messages], [m.id for m in original.messages])
        key = call.session, call.context
        if key in ends:
            assert call.before == changes_between(ends[key], call.messages)
        else:
            assert call.before[0].kind in (ChangeKind.CREATE, ChangeKind.FORK)
            if call.before[0].kind is ChangeKind.FORK:
                parents = ends[call.session, call.parent]
                assert shared_prefix(parents, call.messages) >= call.before[0].num_messages
        assert call.is_one_off == (key not in ends and original.is_one_off)
        ends[key] = call.list_after
        ids = tuple(message.id for message in call.messages)
        for length, message in enumerate(call.messages, 1):
            if (call.session, ids[:length]) not in sent and message.answer_of < 0:
                new_tokens += message.num_tokens
            sent.add((call.session, ids[:length]))
        new_tokens += call.num_generated
    assert new_tokens <= caps.num_new_tokens


def is_subsequence(part: list[str], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(each in rest for each in part)


@given(workloads())
@settings(max_examples=20)
def test_limits_that_nothing_reaches_change_nothing(workload: Workload) -> None:
    assert list(capped(generated(workload), ENOUGH)) == list(generated(workload))


@given(workloads(), st.integers(1, 1500))
@settings(max_examples=30)
def test_lists_with_a_common_beginning_keep_one(workload: Workload, num_tokens: int) -> None:
    """What is kept of a list depends on what stands before it only, so an append does not become an edit."""
    kept = {
        (call.session, call.index): call
        for call in capped(generated(workload), msgspec.structs.replace(ENOUGH, num_list_tokens=num_tokens))
    }
    before: dict[tuple[int, int], Call] = {}
    for call in generated(workload):
        now = kept.get((call.session, call.index))
        last = before.pop((call.session, call.context), None)
        if now is None:
            continue
        if last is not None and [c.kind for c in call.before] == [ChangeKind.APPEND]:
            assert shared_prefix(last.messages, now.messages) == len(last.messages)
        before[call.session, call.context] = now


def test_a_message_that_does_not_fit_is_left_out_whole_and_a_smaller_one_behind_it_stays() -> None:
    [call] = [call for call in generated(Workload(num_sessions=1, num_turns=2)) if call.index == 0]
    tools, system, task = call.messages
    [kept] = capped([call], Caps(num_list_tokens=system.num_tokens + task.num_tokens))
    assert tools.num_tokens > system.num_tokens + task.num_tokens
    assert kept.messages == (system, task)
    assert kept.before == (Change(ChangeKind.CREATE),)
    assert not list(capped([call], Caps(num_list_tokens=task.num_tokens - 1)))
