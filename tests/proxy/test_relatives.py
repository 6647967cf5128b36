"""What a call tells of another context is said there: a compaction, a last word, a wait for a subagent."""

from pathlib import Path
from typing import Any

import pytest

from lifecycle.core.events import (
    CallArrived,
    CallEnded,
    ContextCreated,
    OperationApplied,
    UntrackedForwarded,
)
from lifecycle.core.observations import ReplaceMessages
from lifecycle.vocabulary import CallEnd, IdentityRung, WaitKind
from tests.proxy.test_api_lives import LONG, keys_of, post, until_freed, until_proven
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Whole, lifecycle, system, user, whole_proxy

COMPACT = "/v1/responses/compact"


async def answered(it: Whole) -> tuple[str, str, list[bytes]]:
    """A response's id, its context, and the keys of its prompt, proven."""
    body = {"input": LONG}
    first = await post(it, "/v1/responses", {}, **body)
    context, keys = first.headers["x-kv-context"], keys_of(it, body)
    await until_proven(it, context, keys)
    return first.json()["id"], context, keys


@pytest.mark.parametrize("named", ["by its response", "by its list", "by its name"])
async def test_what_was_summed_up_is_replaced(tmp_path: Path, named: str) -> None:
    async with whole_proxy(tmp_path) as it:
        response_id, context, keys = await answered(it)
        said = {"role": "assistant", "content": "ok"}
        asks: dict[str, dict[str, Any]] = {
            "by its response": {"previous_response_id": response_id},
            "by its list": {"input": [{"role": "user", "content": LONG}, said]},
            "by its name": {"input": "anything"},
        }
        headers = lifecycle(ctx=context) if named == "by its name" else {}
        answer = await post(it, COMPACT, headers, **asks[named])
        assert answer.headers["x-kv-context"] != context, "it is no call of the context"
        await it.until(lambda: "compaction" in it.context(context).sources)
        [applied] = [e.operation for e in await it.events(OperationApplied)]
        assert isinstance(applied, ReplaceMessages)
        assert (applied.ctx, applied.span, applied.n) == (context, (0, 1), 2)
        assert not await it.events(UntrackedForwarded)
        assert keys


async def test_an_engine_that_cannot_compact_changes_nothing(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.compacts = False
        response_id, context, keys = await answered(it)
        body = {"model": NAME, "previous_response_id": response_id}
        refused = await it.data.post(COMPACT, json=body)
        assert (refused.status_code, refused.json()) == (404, {"detail": "Not Found"})
        await it.runtime.mailboxes.settled()
        assert [end.end for end in await it.events(CallEnded)] == [CallEnd.COMPLETED, CallEnd.FAILED]
        assert not await it.events(OperationApplied)
        await it.ops({"op": "close", "seq": 1, "ctx": context})
        await until_freed(it, keys)


async def test_a_compaction_of_nothing_we_know_is_forwarded(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        answer = await post(it, COMPACT, {}, input="something else")
        assert answer.json()["object"] == "response.compaction"
        assert answer.headers["x-kv-mapping"] == "none"
        assert not await it.events(OperationApplied)


DYNAMO = {"x-dynamo-session-id": "d"}
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
BEGIN = [system("you are one of several toys"), user("begin, please, with what is to be done")]


async def test_the_last_word_of_a_session_is_forwarded_and_ends_its_context(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(BEGIN, DYNAMO)
        assert it.context("dynamo:d").open
        last = await it.chat([user("bye")], {**DYNAMO, "x-dynamo-session-final": "true"}, max_tokens=1)
        assert last.status_code == 200
        assert last.headers["x-kv-context"] != "dynamo:d"
        await it.runtime.mailboxes.settled()
        closed = it.context("dynamo:d")
        assert not closed.open
        assert not closed.versions
        assert not it.context(last.headers["x-kv-context"]).versions


async def test_a_last_word_about_nobody_is_only_forwarded(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        answer = await it.chat([user("bye")], {**DYNAMO, "x-dynamo-session-final": "true"})
        assert answer.status_code == 200
        assert all(not state.open for state in it.runtime.tracker.contexts.states.values())


async def test_whoever_sent_a_subagent_waits_for_it(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        claude = {"x-claude-code-session-id": "s"}
        await it.chat(BEGIN, {**claude, **lifecycle(waiting="tool", tool="task")})
        assert it.context("claude-code:s").wait is WaitKind.TOOL
        child = await it.chat([user("look for it, please")], {**claude, "x-claude-code-agent-id": "a"})
        assert child.headers["x-kv-context"] == "claude-code:s:a"
        await it.runtime.mailboxes.settled()
        parent = it.context("claude-code:s")
        assert (parent.wait, parent.wait_tool) == (WaitKind.SUBAGENT, "task")
        [begun] = [e for e in await it.events(ContextCreated) if e.context_id == "claude-code:s:a"]
        assert begun.parent_uid == parent.uid
        assert (begun.rung, begun.reason) == (IdentityRung.CLAUDE_CODE, "x-claude-code-agent-id")


async def test_an_inferred_one_off_leaves_nothing_and_every_call_says_why(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        main = (await it.chat(BEGIN, tools=TOOLS)).headers["x-kv-context"]
        quoting = [user("Write a title for this: begin, please, with what is to be done")]
        title = (await it.chat(quoting)).headers["x-kv-context"]
        assert title != main
        once = it.context(title)
        assert once.one_off
        assert not once.open
        assert not once.versions
        assert it.context(main).open
        arrived = await it.events(CallArrived)
        assert [(e.rung, bool(e.reason)) for e in arrived] == [
            (IdentityRung.NEW, True),
            (IdentityRung.INFERENCE, True),
        ]
