"""A replay sends what the trace's agents would send, says what happens, and tells what came of it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from engine_bridge.sim.clock import run_virtual
from engine_bridge.sim.replay import CallOutcome, ReplayOptions, replay
from engine_bridge.sim.traces.calls import Call, Role
from engine_bridge.sim.traces.generated import Workload, generated
from engine_bridge.sim.traces.texts import Texts
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD
from proxy.lifecycle_fields import read_lifecycle_fields
from tests.engine_bridge.sim.chat_server import ChatServer
from tests.engine_bridge.sim.trace_files import workload_lines, workloads, written

BUSY = Workload(num_sessions=3, num_turns=12, compaction_tokens=4000, fork_share=0.2, rewrite_share=0.2)

BARE = Workload(
    num_sessions=1, num_turns=10, fork_share=0, spawn_share=0, rewrite_share=0, compaction_tokens=10**6
)


@pytest.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with ChatServer().serving() as server:
        yield server


async def played(server: ChatServer, calls: Iterable[Call], **options: Any) -> list[CallOutcome]:
    told: list[CallOutcome] = []
    options = {"base_url": server.base_url, "model": "m", **options}
    await replay(calls, Texts(), ReplayOptions(**options), told.append)
    return told


def pairs(server: ChatServer, told: list[CallOutcome]) -> list[tuple[CallOutcome, dict[str, Any]]]:
    """Each outcome with the body that was sent, for replays of one session at a time."""
    assert len(told) == len(server.heard)
    return list(zip(told, server.heard, strict=True))


async def test_lists_are_the_traces_with_the_answers_that_were_really_given(server: ChatServer) -> None:
    calls = list(generated(BUSY))
    told = await played(server, calls, num_concurrent_sessions=1)
    assert [outcome.call for outcome in told] == calls
    texts = Texts()
    said: dict[tuple[int, int], str] = {}
    num_answers = 0
    for number, (outcome, body) in enumerate(pairs(server, told)):
        call = outcome.call
        said[call.session, call.index] = server.said[number]
        assert len(body["messages"]) == len(call.messages)
        for message, sent in zip(call.messages, body["messages"], strict=True):
            if message.answer_of >= 0:
                num_answers += 1
                assert sent == {"role": "assistant", "content": said[call.session, message.answer_of]}
            else:
                assert sent["content"] == texts.text(message)
        assert body["max_tokens"] == min(call.num_generated, 16)
    assert num_answers > len(calls)


async def test_definitions_of_tools_are_no_results(server: ChatServer) -> None:
    told = await played(server, generated(Workload(num_sessions=1, num_turns=3, fork_share=0, spawn_share=0)))
    outcome, body = pairs(server, told)[-1]
    roles = [message["role"] for message in body["messages"]]
    assert [message.role for message in outcome.call.messages[:3]] == [Role.TOOL, Role.SYSTEM, Role.USER]
    assert roles == ["system", "system", "user", "assistant", "tool", "assistant", "tool"]
    ids = [message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"]
    assert len(set(ids)) == 2


@given(workloads(2))
@settings(max_examples=6)
async def test_what_is_declared_makes_each_list_out_of_the_one_before(workload: Workload) -> None:
    """Read by the proxy's own reader of the field, and applied to a list of the test's own."""
    async with ChatServer().serving() as server:
        told = await played(server, generated(workload), num_concurrent_sessions=1)
    lists: dict[str, list[dict[str, str]]] = {}
    closed: set[str] = set()
    seqs: dict[str, int] = {}
    for number, (outcome, body) in enumerate(pairs(server, told)):
        said = read_lifecycle_fields((), body[LIFECYCLE_BODY_FIELD])
        assert said.errors == ()
        assert said.ctx == outcome.context_id
        assert said.ctx not in closed
        sent = body["messages"]
        if said.ctx not in lists:
            forked = said.fork_at is not None
            start = lists[said.parent][: said.fork_at] if forked else []
            assert forked == outcome.call.before[0].kind.startswith("fork")
            assert said.one_off == outcome.call.is_one_off
        else:
            start = lists[said.ctx]
            for operation in said.ops:
                assert operation.seq == seqs.get(said.ctx, 0) + 1
                seqs[said.ctx] = operation.seq
                first, end = operation.span
                assert end == len(start)
                new = getattr(operation, "n", 0)
                assert len(sent) == first + new
                start = start[:first]
        assert sent[: len(start)] == start, "nothing changed but what was declared"
        lists[said.ctx] = [*sent, {"role": "assistant", "content": server.said[number]}]
        assert said.close == outcome.call.closes
        if said.close:
            closed.add(said.ctx)
    assert closed == set(lists)


async def test_waits_are_declared_and_nothing_at_all_if_asked(server: ChatServer) -> None:
    calls = list(generated(BUSY))
    for outcome in await played(server, calls):
        said = read_lifecycle_fields((), outcome.declared)
        waits = outcome.call.waits_for
        assert said.waiting == (None if waits == "end" else waits)
        assert said.tool == (outcome.call.tools[0] if waits == "tool" else "")
    declared = len(server.heard)
    silent = await played(server, calls, declares=False)
    assert all(LIFECYCLE_BODY_FIELD in body for body in server.heard[:declared])
    assert not any(LIFECYCLE_BODY_FIELD in body for body in server.heard[declared:])
    assert {str(outcome.declared) for outcome in silent} == {"{}"}


async def test_sessions_run_side_by_side_up_to_the_limit_and_each_in_order(server: ChatServer) -> None:
    calls = list(generated(msgspec.structs.replace(BUSY, num_sessions=9)))
    told = await played(server, iter(calls), num_concurrent_sessions=3)
    assert server.most_at_once == 3
    assert len(told) == len(calls)
    for session in range(9):
        mine = [outcome.call.index for outcome in told if outcome.call.session == session]
        assert mine == sorted(mine)


async def test_a_call_that_fails_is_told_and_its_session_goes_on(server: ChatServer) -> None:
    server.refuses = lambda number: number == 2
    server.cuts = lambda number: number == 5
    calls = list(generated(BARE))
    told = await played(server, calls)
    assert [number for number, outcome in enumerate(told) if outcome.error] == [2, 5]
    assert told[2].error.startswith("503")
    assert "not now" in told[2].error
    texts = Texts()
    later = {m["content"] for m in server.heard[-1]["messages"] if m["role"] == "assistant"}
    for number, call in enumerate(calls[:-1]):
        assert call.answer is not None
        assert (texts.text(call.answer) if number in (2, 5) else server.said[number]) in later


async def test_counts_and_times_are_the_servers(server: ChatServer) -> None:
    told = await played(server, generated(BUSY), num_concurrent_sessions=1)
    for number, outcome in enumerate(told):
        assert (outcome.prompt_tokens, outcome.cached_tokens) == (100 + number, number)
        assert outcome.answer_tokens == 2
        assert 0 < outcome.ttft_seconds <= outcome.seconds


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_recorded_gaps_are_waited_as_often_as_was_asked(scale: float) -> None:
    calls = list(generated(msgspec.structs.replace(BUSY, num_sessions=1)))
    ends: list[float] = []

    async def play() -> list[CallOutcome]:
        told: list[CallOutcome] = []

        def hear(outcome: CallOutcome) -> None:
            told.append(outcome)
            ends.append(asyncio.get_running_loop().time())

        async with ChatServer().serving() as server:
            options = ReplayOptions(base_url=server.base_url, model="m", time_scale=scale)
            await replay(calls, Texts(), options, hear)
        return told

    told = run_virtual(play())
    last: dict[int, float] = {}
    for outcome, ended in zip(told, ends, strict=True):
        began = ended - outcome.seconds
        gap = outcome.call.gap_seconds
        if gap is not None:
            assert began >= last[outcome.call.context] + gap * scale - 1e-3
        last[outcome.call.context] = ended
    pauses = sum(call.gap_seconds or 0.0 for call in calls)
    assert (ends[-1] < 1.0) if scale == 0.0 else (ends[-1] < scale * pauses + 1.0)


async def test_a_server_that_is_not_there_is_an_outcome() -> None:
    told: list[CallOutcome] = []
    options = ReplayOptions(base_url="http://127.0.0.1:9/v1", model="m")
    await replay(generated(Workload(num_sessions=1, num_turns=2)), Texts(), options, told.append)
    assert told
    assert all(outcome.error for outcome in told)


async def test_the_command_plays_a_file(server: ChatServer, tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl", workload_lines(BUSY))
    command = [sys.executable, "-m", "engine_bridge.sim.replay", str(path), "--base-url", server.base_url]
    process = await _run([*command, "--model", "m", "--calls", "7", "--no-declare"])
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 7
    assert len(server.heard) == 7
    assert not any(LIFECYCLE_BODY_FIELD in body for body in server.heard)


async def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
