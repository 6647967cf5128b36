"""The report of a whole proxy: what observe promises, what enforce does, how a wrong client loses control."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from lifecycle.core.directives import DirectiveResult, Reclaim
from lifecycle.core.events import (
    CallArrived,
    CallMapped,
    DirectiveProposed,
    DirectiveSettled,
    EnforcementRearmed,
    HarmBudgetExceeded,
    RecordedEvent,
)
from lifecycle.core.ids import KEY_BYTES
from lifecycle.errors import LogUnavailable
from lifecycle.ports import EventLog
from lifecycle.projections.report import Report
from lifecycle.projections.report_harm import HarmBudget
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Arm, DirectiveOutcome, Mode
from proxy.config import Config, HarmConfig
from proxy.metrics import Metrics
from proxy.modes import Modes
from proxy.report import ReportKeeper
from proxy.tasks import owned_tasks
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import Agent, GatedLog, ManualClock, chain_of
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import SECONDS, Message, Whole, lifecycle, system, user, whole_proxy

TIGHT = HarmConfig(share=0.001, floor_prompt_tokens=1_000, min_calls=2)
LONG = "a tool result that fills several chunks of sixteen tokens each"


async def report(it: Whole, by: str = "tenant") -> dict[str, Any]:
    answer = await it.admin.get("/kv/v1/report", params={"since": "1h", "by": by})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def settled(it: Whole, outcome: DirectiveOutcome) -> int:
    records = it.runtime.tracker.contexts.directives.values()
    return sum(r.result is not None and r.result.outcome is outcome for r in records)


async def edit(it: Whole, name: str, outcome: DirectiveOutcome) -> int:
    """A client that takes a message out. Answers how many of the list's tokens a plan asked for."""
    index = it.runtime.tracker.contexts.index
    old = edited(name)
    await it.chat(old, lifecycle(ctx=name, agent="editor"))
    keys = b"".join(it.toy.keys(old))
    await it.until(lambda: not index.unproven(it.context(name).namespace, keys))
    known, done = set(it.runtime.tracker.contexts.directives), settled(it, outcome)
    await it.ops({"op": "remove", "seq": 1, "ctx": name, "span": [1, 2]}, source=name)
    await it.until(lambda: settled(it, outcome) > done)
    records = it.runtime.tracker.contexts.directives
    asked = b"".join(r.directive.keys for i, r in records.items() if i not in known)  # type: ignore[union-attr]
    num_chunks = sum(asked[at : at + KEY_BYTES] in keys for at in range(0, len(asked), KEY_BYTES))
    assert num_chunks
    return num_chunks * CHUNK


async def edit_and_come_back(it: Whole, name: str, outcome: DirectiveOutcome) -> int:
    """One that says so and sends the old list again. Answers how many tokens are needed again."""
    num_tokens = await edit(it, name, outcome)
    await it.chat(edited(name), lifecycle(ctx=name))
    return num_tokens


def edited(name: str) -> list[Message]:
    return [system("be brief"), user(f"{name} {LONG}"), user("go on")]


async def test_observe_says_what_enforce_would_have_done(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE, harm=TIGHT) as it:
        tokens = 0
        for name in ("one", "two", "three"):
            tokens += await edit_and_come_back(it, name, DirectiveOutcome.SUPPRESSED)
        document = await report(it, "agent")
        editor = document["groups"]["editor"]
        assert editor["would_regret_tokens"] == tokens
        assert editor["would_free_tokens"] == editor["dead_seen_tokens"] >= tokens
        assert editor["would_free_bytes"] == 10 * editor["would_free_tokens"]
        assert (editor["freed_tokens"], editor["regretted_tokens"]) == (0, 0)
        assert editor["calls"] == document["total"]["calls"] == 6
        assert editor["prompt_tokens"] == sum(map(len, it.toy.prompts))
        assert editor["cached_tokens"] == sum(it.toy.hits)
        by_arm = (await report(it, "arm"))["groups"]
        assert list(by_arm) == ["observe"]
        assert by_arm["observe"]["would_regret_tokens"] == document["total"]["would_regret_tokens"]
        assert document["verified_share"]["model"] == {NAME: 1.0}
        assert document["verified_share"]["harness"] == {"httpx": 1.0}
        assert document["problems"] == document["harm"] == []
        assert document["complete"]
        assert "needed" in document["comparison"]["missing"]
        assert not it.cache.asked
        assert it.runtime.reporting.sample().dead_tokens == 0
        left = await edit(it, "four", DirectiveOutcome.SUPPRESSED)
        sample = it.runtime.reporting.sample()
        assert left <= sample.dead_tokens < sample.resident_tokens <= len(it.cache.chunks) * CHUNK
        answer = (await it.admin.get("/kv/v1/report/dead")).json()
        assert answer["samples"][-1]["dead_tokens"] == sample.dead_tokens


async def test_dead_chunks_that_leave_the_cache_on_their_own_are_noticed(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE) as it:
        await edit(it, "one", DirectiveOutcome.SUPPRESSED)
        held = it.runtime.reporting.sample().dead_tokens
        assert held
        it.cache.chunks.clear()
        await it.runtime.reporting.look_once()
        assert it.runtime.reporting.sample().dead_tokens == 0
        assert (await report(it))["total"]["evicted_dead_tokens"] == held


async def test_a_wrong_client_loses_control_until_an_operator_gives_it_back(tmp_path: Path) -> None:
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    with structlog.testing.capture_logs() as said:
        async with whole_proxy(tmp_path, harm=TIGHT, log_url=log_url) as it:
            tokens = await edit_and_come_back(it, "one", DirectiveOutcome.APPLIED)
            assert (await report(it))["total"]["regretted_tokens"] == tokens
            assert not it.runtime.tracker.contexts.demotions
            tokens += await edit_and_come_back(it, "two", DirectiveOutcome.APPLIED)
            await it.until(lambda: bool(it.runtime.tracker.contexts.demotions))
            document = await report(it)
            assert document["total"]["regretted_tokens"] == tokens
            (harm,) = document["harm"]
            assert harm["exceeded"]
            assert harm["demoted"]
            asked = len(it.cache.asked)
            await edit_and_come_back(it, "three", DirectiveOutcome.SUPPRESSED)
            assert len(it.cache.asked) == asked
            ready = (await it.admin.get("/readyz")).json()
            assert ready["demoted"] == [{"model": NAME, "tenant": "default"}]
            assert any("harm budget" in p and "PATCH /kv/v1/config" in p for p in ready["problems"])
            assert b"kvtether_harm_budget_exceeded 1.0" in (await it.admin.get("/metrics")).content
            regretted = f"kvtether_regretted_tokens_total {tokens}.0".encode()
            assert regretted in (await it.admin.get("/metrics")).content
    (alert,) = [entry for entry in said if entry["log_level"] == "error"]
    assert (alert["model"], alert["tenant"], alert["regretted_tokens"]) == (NAME, "default", tokens)
    async with whole_proxy(tmp_path, harm=TIGHT, log_url=log_url) as it:
        await edit_and_come_back(it, "four", DirectiveOutcome.SUPPRESSED)
        await it.runtime.reporting.caught_up.wait()
        document = await report(it)
        assert document["total"]["regretted_tokens"] == tokens
        assert document["groups"]["default"]["calls"] == 8
        rule = {"modes": [{"mode": "enforce", "model": NAME, "tenant": "default"}]}
        answer = await it.admin.patch("/kv/v1/config", json=rule)
        assert answer.json()["demoted"] == []
        await edit_and_come_back(it, "five", DirectiveOutcome.APPLIED)
        assert (await report(it))["problems"] == []
        assert len(await it.events(HarmBudgetExceeded)) == len(await it.events(EnforcementRearmed)) == 1
        told = Report(HarmBudget(**msgspec.structs.asdict(TIGHT)))
        while told.position < it.runtime.reporting.report.position:
            for recorded in (await it.recorded())[told.position :]:
                told.apply(recorded)
        now_ns = it.runtime.clock.now_ns()
        assert told.digest(now_ns) == it.runtime.reporting.report.digest(now_ns)


async def test_calls_of_the_holdout_are_told_apart(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, holdout=0.5) as it:
        for number in range(8):
            await it.chat([user(f"hello {number}")], lifecycle(ctx=f"c{number}"))
        arrived = await it.events(CallArrived)
        held = [it.runtime.modes.held_out(it.context(f"c{n}").uid) for n in range(8)]
        assert [e.arm for e in arrived] == [Arm.HOLDOUT if h else Arm.ENFORCE for h in held]
        groups = (await report(it, "arm"))["groups"]
        assert {name: group["calls"] for name, group in groups.items()} == {
            arm: n for arm, n in (("enforce", held.count(False)), ("holdout", held.count(True))) if n
        }


@asynccontextmanager
async def keeping(
    tracker: Tracker, log: EventLog, harm: HarmConfig | None = None
) -> AsyncIterator[ReportKeeper]:
    """A keeper at work."""
    begun = asyncio.Event()
    begun.set()
    async with owned_tasks() as tasks:
        modes = Modes(Config(mode=Mode.ENFORCE), lambda: tracker.contexts.demotions)
        cache, metrics = FakeCache(), Metrics(tracker)
        keeper = ReportKeeper(tracker, log, cache, modes, harm or HarmConfig(), tasks, metrics, begun)
        tasks.keep(keeper.run)
        yield keeper


async def test_what_was_recorded_while_the_log_is_read_is_counted_once() -> None:
    log, clock = MemoryEventLog(), ManualClock()
    tracker = Tracker(log, clock)
    await tracker.start()
    agents = [Agent(tracker, f"u{n}") for n in range(60)]
    for agent in agents:
        await agent.open()
        await agent.call("s1 u1")
    again = Tracker(log, clock)
    await again.start()
    async with keeping(again, log) as keeper:
        for agent in agents:
            await Agent(again, agent.uid, agent.name).call("s1 u1 a1 u2", "c2")
        async with asyncio.timeout(SECONDS):
            await keeper.caught_up.wait()
        await Agent(again, "u0", agents[0].name).call("s1 u1 a1 u2 a2 u3", "c3")
        told = Report(HarmBudget())
        async for recorded in log.read_all():
            told.apply(recorded)
        assert keeper.report.since(0, clock.now).total().calls == 121
        assert keeper.report.digest(clock.now) == told.digest(clock.now)


async def test_control_is_lost_when_the_log_is_back() -> None:
    """Meanwhile nothing is freed: a directive needs the log as well."""
    log, clock = GatedLog(MemoryEventLog()), ManualClock()
    tracker = Tracker(log, clock)
    await tracker.start()
    async with keeping(tracker, log, HarmConfig(share=0.0, floor_prompt_tokens=0, min_calls=1)) as keeper:
        agent = Agent(tracker, "a")
        await agent.open()
        await agent.call("s1 u1")
        keys, owners = chain_of("s1 u9")[-KEY_BYTES:], (("a", 1),)
        directive = Reclaim(directive_id="d", namespace=NAMESPACE, reason="dead", keys=keys, owners=owners)
        await tracker.record(NAMESPACE, [DirectiveProposed(at_ns=clock.now, directive=directive, as_of=1)])
        result = DirectiveResult(outcome=DirectiveOutcome.APPLIED, applied=1, gone=keys)
        settled = DirectiveSettled(at_ns=clock.now, directive_id="d", namespace=NAMESPACE, result=result)
        await tracker.record(NAMESPACE, [settled])
        heard = asyncio.Event()

        def listen(batch: Sequence[RecordedEvent]) -> None:
            heard.set()
            if any(isinstance(r.event, CallMapped) for r in batch):
                log.away = LogUnavailable("away")
                log.waiting.clear()

        await agent.arrive("s1 u9", "c2")
        tracker.listeners.append(listen)
        await agent.map("s1 u9", "c2")
        async with asyncio.timeout(SECONDS):
            await log.waiting.wait()
        assert not tracker.contexts.demotions
        log.away = None
        async with asyncio.timeout(SECONDS):
            while not tracker.contexts.demotions:
                heard.clear()
                await heard.wait()
        assert list(keeper.demotions) == [("model", "t")]
        assert "model model, tenant t" in keeper.problems[0]
        await keeper.rearm("", "somebody else")
        assert keeper.demotions
        await keeper.rearm("model", "")
        assert not keeper.demotions
