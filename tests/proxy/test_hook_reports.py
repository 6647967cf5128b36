"""What hooks do to contexts: exactly what they tell, once, however often and late they come."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lifecycle.core.events import (
    ContextClosed,
    ContextCreated,
    ContextResumed,
    ListEdited,
    OperationApplied,
    WaitDeclared,
)
from lifecycle.core.state import list_path
from lifecycle.vocabulary import WaitKind
from proxy.harness_contexts import claude_code_context, codex_context, session_context
from tests.proxy.api_keys import bearer, keys
from tests.proxy.test_api_lives import keys_of, until_freed, until_proven
from tests.proxy.test_claude_code_hooks import AGENT, SESSION
from tests.proxy.test_claude_code_hooks import hook as claude_code
from tests.proxy.test_codex_hooks import ROOT
from tests.proxy.test_codex_hooks import hook as codex
from tests.proxy.test_opencode_hooks import event as opencode
from tests.proxy.toy_model import CHUNK
from tests.proxy.whole_proxy import Whole, assistant, lifecycle, system, user, whole_proxy

CLAUDE, CODEX = claude_code_context(SESSION), codex_context(ROOT)
LIST = [user("a first question"), assistant("ok"), user("and a second one")]


async def told(
    it: Whole, harness: str, event: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> str:
    """Post a hook, and wait until what it told is recorded; answers what was said to become of it.

    `queued` is said of whatever takes longer than a moment.
    """
    answer = await it.data.post(f"/kv/v1/hooks/{harness}", json=event, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {}), answer.text
    await it.runtime.hooks.settled()
    return answer.headers["x-kv-hook"]


def length(it: Whole, name: str) -> int:
    state = it.context(name)
    branch = state.current_branch()
    return len(list_path(state, branch.tip)) if branch else 0


async def test_a_compaction_takes_out_what_it_summed_up_and_nothing_else(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat([system("be brief"), *LIST], lifecycle(ctx=CODEX))
        await it.chat([user("another agent's")], lifecycle(ctx="other"))
        await told(it, "codex", codex("PreCompact"))
        assert length(it, CODEX) == 4
        assert await told(it, "codex", codex("PostCompact")) in ("taken", "queued")
        [edit] = await it.events(ListEdited)
        assert (edit.start, edit.end) == (2, 4), "instructions and the first question stay"
        assert (length(it, CODEX), length(it, "other")) == (2, 1)
        await told(it, "codex", codex("PostCompact"))
        await told(it, "codex", codex("SessionStart", source="compact"))
        compacted = [system("be brief"), LIST[0], user("a summary"), assistant("ok"), user("go on")]
        await it.chat(compacted, lifecycle(ctx=CODEX))
        assert len(await it.events(ListEdited)) == 1
        assert length(it, CODEX) == 5


async def test_a_compaction_frees_what_it_took_out_and_leaves_what_stays(tmp_path: Path) -> None:
    stays = [system("be brief " * 9), user("a first question, long enough for chunks of its own")]
    messages = [*stays, assistant("an answer " * 9), user("and a second question " * 5)]
    async with whole_proxy(tmp_path) as it:
        await it.chat(messages, lifecycle(ctx=CODEX))
        keys = keys_of(it, {"messages": messages})
        await until_proven(it, CODEX, keys)
        await told(it, "codex", codex("PreCompact"))
        await told(it, "codex", codex("PostCompact"))
        after = keys_of(it, {"messages": [*stays, user("the summary")]})
        num_shared = sum(old == new for old, new in zip(keys, after, strict=False))
        assert 0 < num_shared < len(keys)
        await until_freed(it, keys[num_shared + 1 :])
        await it.chat([*stays, user("the summary")], lifecycle(ctx=CODEX))
        assert it.toy.hits[-1] >= num_shared * CHUNK, "what stayed is hit by the next call"


async def test_of_others_nothing_but_instructions_outlives_a_compaction(tmp_path: Path) -> None:
    main = session_context("ses_main")
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CLAUDE))
        await told(it, "claude-code", claude_code("PreCompact"))
        await told(it, "claude-code", claude_code("PostCompact"))
        await it.chat([system("be brief"), *LIST], lifecycle(ctx=main))
        await told(it, "opencode", opencode("session.compacting", sessionID="ses_main"))
        await told(it, "opencode", opencode("session.compacted", sessionID="ses_main"))
        assert (length(it, CLAUDE), length(it, main)) == (0, 1)


async def test_a_compaction_that_is_told_after_its_list_was_seen_changes_nothing(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CLAUDE))
        await told(it, "claude-code", claude_code("PreCompact"))
        await it.chat([user("a summary"), user("go on")], lifecycle(ctx=CLAUDE))
        await told(it, "claude-code", claude_code("PostCompact"))
        assert length(it, CLAUDE) == 2
        # One that nobody saw begin might be about any list.
        await told(it, "claude-code", claude_code("PostCompact"))
        assert not await it.events(ListEdited)


async def test_a_subagent_begins_and_ends_with_its_hooks(tmp_path: Path) -> None:
    sub = claude_code_context(SESSION, AGENT)
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CLAUDE))
        for _ in range(2):
            await told(it, "claude-code", claude_code("SubagentStart", agent_id=AGENT))
        assert it.context(sub).parent_uid == it.context(CLAUDE).uid
        await it.chat([user("look")], lifecycle(ctx=sub))
        for _ in range(2):
            await told(it, "claude-code", claude_code("SubagentStop", agent_id=AGENT))
        assert not it.context(sub).open
        assert it.context(CLAUDE).open
        assert len(await it.events(ContextCreated)) == 2
        assert len(await it.events(ContextClosed)) == 1


async def test_a_session_ends_with_its_subagents(tmp_path: Path) -> None:
    sub = claude_code_context(SESSION, AGENT)
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CLAUDE))
        await it.chat([user("look")], lifecycle(ctx=sub, parent=CLAUDE))
        await it.chat([user("look closer")], lifecycle(ctx="deeper", parent=sub))
        await it.chat([user("somebody else's")], lifecycle(ctx="other"))
        await told(it, "claude-code", claude_code("SessionEnd", reason="other"))
        assert [it.context(name).open for name in (CLAUDE, sub, "deeper", "other")] == [False] * 3 + [True]
        # A session that goes on later is open again.
        await it.chat([*LIST, assistant("ok"), user("more")], lifecycle(ctx=CLAUDE))
        assert it.context(CLAUDE).open


async def test_waits_are_declared_once_and_end(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CODEX))
        for _ in range(2):
            await told(it, "codex", codex("PreToolUse", tool_name="pytest"))
        state = it.context(CODEX)
        assert (state.wait, state.wait_tool) == (WaitKind.TOOL, "pytest")
        for _ in range(2):
            await told(it, "codex", codex("PostToolUse", tool_name="pytest"))
        await told(it, "codex", codex("Stop"))
        assert it.context(CODEX).wait is WaitKind.HUMAN
        assert [e.kind for e in await it.events(WaitDeclared)] == [WaitKind.TOOL, WaitKind.HUMAN]
        assert len(await it.events(ContextResumed)) == 1


async def test_an_idle_session_waits_for_its_user_and_an_idle_subagent_is_over(tmp_path: Path) -> None:
    main, sub = session_context("ses_main"), session_context("ses_sub")
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=main))
        await told(
            it, "opencode", opencode("session.created", info={"id": "ses_sub", "parentID": "ses_main"})
        )
        await it.chat([user("look")], lifecycle(ctx=sub))
        for session in ("ses_sub", "ses_main"):
            await told(it, "opencode", opencode("session.idle", sessionID=session))
        assert not it.context(sub).open
        assert (it.context(main).open, it.context(main).wait) == (True, WaitKind.HUMAN)


async def test_hooks_of_contexts_that_nobody_has_seen_change_nothing(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        position = it.runtime.tracker.contexts.position
        for name in ("SessionStart", "PreToolUse", "PostToolUse", "PreCompact", "PostCompact", "Stop"):
            await told(it, "codex", codex(name))
        assert await told(it, "codex", codex("SessionEnd")) in ("ignored: no such context", "queued")
        assert it.runtime.tracker.contexts.position == position


async def test_hooks_reach_their_own_tenant_only(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        await it.chat(LIST, {**lifecycle(ctx=CLAUDE), **bearer("a")})
        await told(it, "claude-code", claude_code("SessionEnd"), bearer("b"))
        assert it.context(CLAUDE, "a").open
        await told(it, "claude-code", claude_code("SessionEnd"), bearer("a"))
        assert not it.context(CLAUDE, "a").open


async def test_hooks_are_numbered_by_the_books_beside_the_agents_own_operations(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CODEX))
        await it.ops({"op": "waiting", "seq": 1, "ctx": CODEX, "kind": "subagent"})
        await told(it, "codex", codex("Stop"))
        await told(it, "codex", codex("SessionEnd"))
        applied = [(e.source, e.operation.seq) for e in await it.events(OperationApplied)]
        assert applied == [("s", 1), ("hooks:codex", 1), ("hooks:codex", 2)]


async def test_the_call_between_the_hooks_of_a_compaction_is_a_one_off(tmp_path: Path) -> None:
    session = {"x-claude-code-session-id": SESSION}
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, session)
        await told(it, "claude-code", claude_code("PreCompact"))
        asked = await it.chat([*LIST, assistant("ok"), user("sum it up")], session)
        assert asked.headers["x-kv-context"] != CLAUDE
        assert it.context(asked.headers["x-kv-context"]).one_off
        await told(it, "claude-code", claude_code("PostCompact"))
        assert length(it, CLAUDE) == 0
        after = await it.chat([user("a summary"), user("go on")], session)
        assert after.headers["x-kv-context"] == CLAUDE


async def test_a_compaction_that_was_given_up_leaves_the_next_turn_a_turn(tmp_path: Path) -> None:
    session = {"x-claude-code-session-id": SESSION}
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, session)
        await told(it, "claude-code", claude_code("PreCompact"))
        await told(it, "claude-code", claude_code("UserPromptSubmit", prompt="go on"))
        after = await it.chat([*LIST, assistant("ok"), user("go on")], session)
        assert after.headers["x-kv-context"] == CLAUDE
        assert length(it, CLAUDE) == 5
