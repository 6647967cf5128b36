"""What an operator reads of agents that throw their own KV away: by API, in metrics and in the log."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from lifecycle.core.events import PrefixDiverged
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import PrefixBreak
from proxy.lifecycle_fields import LifecycleFields
from proxy.prefix_lint import PrefixLint, change_of
from proxy.tracked_call import TrackedCall
from tests.lifecycle.lives import ManualClock
from tests.proxy import conversations as said
from tests.proxy.test_tracked_call import request
from tests.proxy.toy_model import CHUNK
from tests.proxy.whole_proxy import Message, Whole, assistant, lifecycle, system, user, whole_proxy

RULES = "Be good, and be so at all times. " * 8


async def lint(it: Whole, ctx: str) -> dict[str, Any]:
    """As the admin API shows it."""
    uid = it.context(ctx).uid
    return dict((await it.admin.get(f"/kv/v1/contexts/{uid}")).json()["lint"])


async def scraped(it: Whole, name: str) -> dict[str, float]:
    """A counter by its labels."""
    text = (await it.admin.get("/metrics")).text
    rows = re.findall(rf"^kvtether_{name}_total\{{(.*?)\}} (\S+)$", text, re.MULTILINE)
    return {labels: float(number) for labels, number in rows}


def agent(dated: str, *turns: Message) -> list[Message]:
    return [system(f"An agent. Current time: {dated}\n{RULES}"), user("What is there?"), *turns]


async def test_a_clock_in_the_system_prompt_is_named_with_what_it_costs(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first, second = agent("14:03"), agent("14:04", assistant("ok"), user("And now?"))
        with capture_logs() as lines:
            for messages in (first, second):
                assert (await it.chat(messages, lifecycle(ctx="a"))).status_code == 200
        old, new = it.toy.prompts[-2:]
        shared = next(n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b) // CHUNK * CHUNK
        shown = await lint(it, "a")
        (found,) = shown["last"]
        assert (found["kind"], found["index"], found["role"]) == ("timestamp", 0, "system")
        assert found["shared_tokens"] == shared == it.toy.hits[-1], "the engine found as much, and no more"
        # What the answer's own tokens filled had gone on, too.
        assert shown["lost_tokens"] == found["lost_tokens"] >= len(old) // CHUNK * CHUNK - shared
        assert (shown["count"], shown["declared"], shown["beside"]["count"]) == (
            1,
            {"count": 0, "lost_tokens": 0},
            0,
        )
        labels = 'how="undeclared",kind="timestamp"'
        assert await scraped(it, "prefix_divergences") == {labels: 1.0}
        assert (await scraped(it, "prefix_lost_tokens"))[labels] == found["lost_tokens"]
        (line,) = [each for each in lines if each["event"] == "a prompt left the one before it"]
        assert (line["ctx"], line["kind"], line["message"]) == ("a", "timestamp", 0)
        assert line["lost_tokens"] == found["lost_tokens"]
        assert "14:0" not in json.dumps(lines), "categories are told, never text"


async def test_an_agent_that_only_goes_on_has_no_finding(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        messages = agent("14:03")
        for turn in range(3):
            reply = (await it.chat(messages, lifecycle(ctx="a"))).json()["choices"][0]["message"]["content"]
            messages += [assistant(reply), user(f"And {turn}?")]
        assert await lint(it, "a") == {
            "count": 0,
            "lost_tokens": 0,
            "declared": {"count": 0, "lost_tokens": 0},
            "beside": {"count": 0, "lost_tokens": 0},
            "last": [],
        }


async def test_a_declared_edit_is_no_complaint(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        messages = agent("14:03", assistant("ok"), user(RULES), assistant("ok"), user("And now?"))
        await it.chat(messages, lifecycle(ctx="a"))
        await it.ops({"op": "remove", "seq": 1, "ctx": "a", "span": [1, 3]})
        del messages[1:3]
        await it.chat(messages, lifecycle(ctx="a"))
        shown = await lint(it, "a")
        assert (shown["count"], shown["declared"]["count"]) == (0, 1)
        assert shown["declared"]["lost_tokens"] == shown["last"][0]["lost_tokens"]
        assert [(e["kind"], e["index"], e["declared"]) for e in shown["last"]] == [("removed", 1, True)]
        assert set(await scraped(it, "prefix_divergences")) == {'how="declared",kind="removed"'}


async def test_an_answer_that_the_client_rewrote_is_named(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: "A long answer, of many words. " * 4
        messages = agent("14:03")
        await it.chat(messages, lifecycle(ctx="a"))
        await it.until(
            lambda: any(v.index == -2 and v.num_chunks > 1 for v in it.context("a").versions.values())
        )
        await it.chat([*messages, assistant("In short: yes."), user("And now?")], lifecycle(ctx="a"))
        (found,) = (await lint(it, "a"))["last"]
        assert (found["kind"], found["index"], found["role"]) == ("answer", 2, "assistant")
        assert found["lost_tokens"] > 0


async def test_conversations_that_begin_alike_but_for_a_nonce_are_found(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(agent("2026-11-30T14:03:22Z"), lifecycle(ctx="a"))
        await it.chat(agent("2026-11-30T15:04:23Z"), lifecycle(ctx="b"))
        shown = await lint(it, "b")
        (found,) = shown["last"]
        assert (found["against"], found["kind"], found["index"]) == (it.context("a").uid, "timestamp", 0)
        assert found["shared_tokens"] == it.toy.hits[-1]
        assert shown["beside"] == {"count": 1, "lost_tokens": found["lost_tokens"]}
        assert (shown["count"], (await lint(it, "a"))["beside"]["count"]) == (0, 0)
        head = it.toy.tokens(agent("2026-11-30T15:04:23Z")[:1])
        assert abs(found["shared_tokens"] + found["lost_tokens"] - len(head)) < 2 * CHUNK + 30


async def test_after_a_restart_the_findings_are_there_and_the_next_has_a_place(tmp_path: Path) -> None:
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    async with whole_proxy(tmp_path, log_url=log_url) as it:
        await it.chat(agent("14:03"), lifecycle(ctx="a"))
        await it.chat(agent("14:04"), lifecycle(ctx="a"))
        before = await lint(it, "a")
    async with whole_proxy(tmp_path, log_url=log_url) as it:
        assert await lint(it, "a") == before
        await it.chat(agent("14:05"), lifecycle(ctx="a"))
        after = await lint(it, "a")
        assert [e["kind"] for e in after["last"]] == ["timestamp", "system"], "its text was in memory only"
        assert after["last"][1]["lost_tokens"] > 0
        await it.chat(agent("14:06"), lifecycle(ctx="a"))
        assert (await lint(it, "a"))["last"][-1]["kind"] == "timestamp"
        assert len(await it.events(PrefixDiverged)) == 3


# -- kinds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ([said.user("step 3"), said.user("b")], [said.user("step 4"), said.user("b")], PrefixBreak.COUNTER),
        ([said.user("a")], [said.user("b")], None),
        ([said.user("a")], [said.user("a"), said.assistant("yes"), said.user("b")], None),
        ([said.user("a")], [said.user("a"), said.assistant("no"), said.user("b")], PrefixBreak.ANSWER),
        ([said.user("a"), said.user("b")], [said.user("a")], None),
    ],
)
def test_calls_are_compared_where_they_part(
    old: list[said.Message], new: list[said.Message], kind: PrefixBreak | None
) -> None:
    echoes = frozenset([said.HASHER.echo(said.assistant("yes"))])
    assert change_of(said.chat(old), said.chat(new), echoes) is kind


messages = st.lists(
    st.builds(said.user, st.text(max_size=5)) | st.builds(said.assistant, st.text(max_size=5))
)


@given(messages, messages)
def test_any_two_calls_can_be_compared(old: list[said.Message], new: list[said.Message]) -> None:
    kind = change_of(said.chat(old), said.chat(new))
    assert kind is None or old != new


# -- memory -----------------------------------------------------------------------------------------------


def call(size: int) -> TrackedCall:
    asked = replace(said.chat([said.user("a")]), size_bytes=size)
    whole = request(LifecycleFields())
    return TrackedCall(replace(whole, asked=asked), lambda c: None, lambda *told: None)


async def test_texts_are_bounded_and_those_heard_of_last_stay() -> None:
    lint = PrefixLint(Tracker(MemoryEventLog(), ManualClock()), max_bytes=100)
    for number in range(10):
        lint.begin(call(30), f"c{number}")
        assert lint.size_bytes <= 100
    known, forgotten = call(30), call(30)
    lint.begin(known, "c9")
    lint.begin(forgotten, "c0")
    assert (known.opens, forgotten.opens) == (False, True)
    lint.begin(call(1000), "huge")
    assert lint.size_bytes <= 100


async def test_what_closed_is_let_go(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        held = it.runtime.tracking._mapper._lint
        await it.chat(agent("14:03"), lifecycle(ctx="a"))
        assert held.size_bytes > 0
        await it.chat(agent("14:03", user("bye")), lifecycle(ctx="a", close=True))
        await it.until(lambda: not it.context("a").open)
        assert held.size_bytes == 0
