"""Figures that can be counted on the fingers, and bounded."""

import msgspec
import pytest

from lifecycle.core.events import (
    BackendLost,
    CallArrived,
    EnforcementRearmed,
    PrefixDiverged,
    UntrackedForwarded,
)
from lifecycle.core.ids import Namespace, context_stream
from lifecycle.projections.report import MAX_CALLS, MAX_CONTEXTS, Report
from lifecycle.projections.report_counts import UNKNOWN, Counts, Dimension, killers
from lifecycle.projections.report_watch import REGRET_NS
from lifecycle.reclaimer import Reclaimer
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Arm, DirectiveOutcome, Mode, PrefixBreak
from tests.lifecycle.core import story
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import Agent, CountedIds, ManualClock, chain_of
from tests.lifecycle.projections.tale import SECOND, SIZE, SPACE, TOKEN_BYTES, Tale, keys
from tests.lifecycle.projections.tale_report import BUDGET, told


def groups_of(tale: Tale, by: Dimension = "tenant") -> dict[str, Counts]:
    return told(tale).since(tale.now - 3600 * SECOND, tale.now).by(by)


def total(tale: Tale) -> Counts:
    return told(tale).since(tale.now - 3600 * SECOND, tale.now).total()


def test_a_call_is_counted_for_whom_it_ran() -> None:
    tale = Tale()
    tale.context("a", "t1", "coder")
    tale.context("b", "t2")
    tale.call("a", keys("1", "2"), prompt=9, cached=4, harness="codex", shown=2)
    tale.call("a", keys("3"), known=2, prompt=13, cached=8, harness="codex", shown=2)
    tale.call("b", keys("9"), prompt=5, arm=None)
    assert total(tale) == Counts(
        calls=3,
        calls_mapped=3,
        calls_counted=2,
        prompt_tokens=27,
        counted_prompt_tokens=22,
        cached_tokens=12,
        chunks_checked=5,
        chunks_shown=4,
    )
    assert {n: c.calls for n, c in groups_of(tale, "tenant").items()} == {"t1": 2, "t2": 1}
    assert {n: c.calls for n, c in groups_of(tale, "agent").items()} == {"coder": 2, UNKNOWN: 1}
    assert {n: c.calls for n, c in groups_of(tale, "harness").items()} == {"codex": 2, UNKNOWN: 1}
    assert {n: c.calls for n, c in groups_of(tale, "arm").items()} == {"enforce": 2, UNKNOWN: 1}
    assert {n: c.calls for n, c in groups_of(tale, "model").items()} == {"m": 3}


def test_what_made_prompts_leave_is_counted_for_the_harness_that_sent_them() -> None:
    tale = Tale()
    for uid, harness in (("a", "claude-code"), ("b", "codex")):
        tale.context(uid, "t1")
        tale.call(uid, keys("1"), prompt=9, harness=harness)
    for uid, kind, lost, more in (
        ("a", PrefixBreak.BILLING, 500, {}),
        ("a", PrefixBreak.BILLING, 300, {"against": "b"}),
        ("b", PrefixBreak.TIMESTAMP, 40, {}),
        ("b", PrefixBreak.TIMESTAMP, -1, {}),
        ("b", PrefixBreak.REMOVED, 7_000, {"declared": True}),
    ):
        left = PrefixDiverged(
            at_ns=tale.now, call_id="c", attempt=1, kind=kind, index=0, lost_tokens=lost, **more
        )
        tale.tell(context_stream(uid), left)
    counts = total(tale)
    assert (counts.prefix_breaks, counts.prefix_lost_tokens) == (3, 540)
    assert (counts.head_breaks, counts.head_lost_tokens) == (1, 300)
    assert (counts.declared_edits, counts.declared_lost_tokens) == (1, 7_000)
    found = killers(told(tale).since(tale.now - 3600 * SECOND, tale.now).cells)
    assert [(harness, left) for harness, left, _ in found] == [
        ("claude-code", "billing"),
        ("codex", "timestamp"),
    ]
    assert groups_of(tale, "harness")["codex"].declared_edits == 1


def test_dead_chunks_are_seen_once_and_freed_by_the_caches_own_word() -> None:
    tale = Tale()
    tale.context("a", "t1")
    tale.context("b", "t2")
    tale.call("a", keys("1"))
    directive = tale.dead(keys("x", "y", "z"), ("a", 2), ("b", 1))
    tale.settle(directive, DirectiveOutcome.APPLIED, keys("x"))
    tale.wait(30)
    again = tale.dead(keys("y", "z"), ("a", 1), ("b", 1))
    tale.settle(again, DirectiveOutcome.APPLIED, keys("y", "z"))
    counts = groups_of(tale)
    assert counts["t1"].dead_seen_tokens == counts["t1"].freed_tokens == 2 * SIZE
    assert counts["t2"].dead_seen_tokens == counts["t2"].freed_tokens == SIZE
    assert total(tale).freed_bytes == 3 * SIZE * TOKEN_BYTES
    assert total(tale).dead_seen_bytes == 3 * SIZE * TOKEN_BYTES
    assert told(tale).watch.num_dead(SPACE) == 0


@pytest.mark.parametrize(("late_ns", "regretted"), [(0, SIZE), (REGRET_NS, SIZE), (REGRET_NS + 1, 0)])
def test_what_was_removed_and_is_needed_within_ten_minutes_is_regretted_once(
    late_ns: int, regretted: int
) -> None:
    tale = Tale()
    tale.context("a", "t1")
    tale.context("b", "t2")
    tale.call("a", keys("1"))
    tale.freed(keys("x"), ("a", 1))
    tale.now += late_ns
    tale.call("b", keys("x"))
    tale.call("b", keys("x"))
    groups = groups_of(tale)
    assert groups["t1"].regretted_tokens == regretted
    assert groups["t2"].regretted_tokens == 0
    assert total(tale).would_regret_tokens == 0


def test_in_observe_the_same_is_said_in_the_conditional() -> None:
    tale = Tale()
    tale.context("a")
    tale.call("a", keys("1"), arm=Arm.OBSERVE)
    tale.observed(keys("x", "y"), ("a", 2))
    assert told(tale).watch.num_dead(SPACE) == told(tale).watch.num_suppressed(SPACE) == 2
    tale.gone(keys("x"))
    tale.call("a", keys("x", "z"), arm=Arm.OBSERVE)
    counts = total(tale)
    assert counts.would_free_tokens == 2 * SIZE
    assert counts.freed_tokens == 0
    assert counts.evicted_dead_tokens == SIZE
    assert counts.would_regret_tokens == SIZE
    assert counts.regretted_tokens == 0
    assert told(tale).watch.num_dead(SPACE) == 1
    assert told(tale).harm.all(tale.now) == []


def test_a_chunk_that_comes_back_before_its_removal_is_no_regret_unless_it_was_removed_all_the_same() -> None:
    tale = Tale()
    tale.context("a")
    tale.call("a", keys("1"))
    directive = tale.dead(keys("x", "y"), ("a", 2))
    tale.call("a", keys("x", "y"))
    tale.settle(directive, DirectiveOutcome.APPLIED, keys("y"))
    counts = total(tale)
    assert counts.revived_tokens == 2 * SIZE
    assert counts.freed_tokens == 0
    assert counts.regretted_tokens == SIZE


def test_a_directive_without_owners_is_nobodys_and_harms_nobodys_budget() -> None:
    tale = Tale()
    tale.context("a")
    tale.call("a", keys("1"))
    tale.freed(keys("x", "y", "z"), ("a", 1))
    for name in "xyz":
        tale.call("a", keys(name))
    groups = groups_of(tale)
    assert groups[UNKNOWN].freed_tokens == 2 * SIZE
    assert groups["t"].freed_tokens == SIZE
    assert [h.regretted_tokens for h in told(tale).harm.all(tale.now)] == [SIZE]


@pytest.mark.parametrize(
    ("prompt", "cached", "recomputed"),
    [(17, 16, 0), (17, 8, 8), (17, 9, 4), (16, 12, 0), (16, 8, 4), (40, 0, 16)],
)
def test_what_the_context_had_computed_before_and_was_computed_again(
    prompt: int, cached: int, recomputed: int
) -> None:
    tale = Tale()
    tale.context("a")
    tale.call("a", keys("1", "2", "3", "4"), prompt=17, cached=0)
    tale.call("a", b"", known=4, prompt=prompt, cached=cached)
    assert total(tale).recomputed_tokens == recomputed
    assert total(tale).avoidable_tokens == 0


def test_a_recomputed_prefix_was_avoidable_as_far_as_dead_chunks_took_its_room() -> None:
    tale = Tale()
    tale.context("a")
    tale.call("a", keys("1", "2", "3", "4"), prompt=17, cached=0)
    tale.observed(keys("x", "y"), ("a", 2))
    tale.call("a", b"", known=4, prompt=17, cached=4)
    assert total(tale).recomputed_tokens == 3 * SIZE
    assert total(tale).avoidable_tokens == 2 * SIZE


def test_what_is_computed_again_on_another_engine_is_no_fault_of_dead_chunks() -> None:
    for moved in ({"backend": "b"}, {"backend": "a", "took": "b"}):
        tale = Tale()
        tale.context("x")
        tale.call("x", keys("1", "2", "3", "4"), prompt=17, cached=0, backend="a")
        tale.observed(keys("d", "e"), ("x", 2))
        tale.call("x", b"", known=4, prompt=17, cached=0, **moved)
        assert total(tale).recomputed_tokens == total(tale).moved_tokens == 4 * SIZE
        assert total(tale).avoidable_tokens == 0
        tale.call("x", b"", known=4, prompt=17, cached=8, backend="b")
        assert total(tale).moved_tokens == 4 * SIZE
        assert total(tale).avoidable_tokens == 2 * SIZE


def test_what_an_engine_held_is_lost_once_with_it() -> None:
    tale = Tale()
    for uid, backend in (("x", "a"), ("y", "b"), ("z", "a")):
        tale.context(uid)
        tale.call(uid, keys(uid + "1", uid + "2"), prompt=9, cached=0, backend=backend)
    lost = BackendLost(at_ns=tale.now, namespace=SPACE, backend="a")
    tale.tell(SPACE.stream(), lost)
    tale.tell(SPACE.stream(), lost)
    assert total(tale).lost_tokens == 4 * SIZE
    tale.observed(keys("d"), ("x", 1))
    tale.call("x", b"", known=2, prompt=9, cached=0, backend="a")
    assert total(tale).moved_tokens == 2 * SIZE
    assert total(tale).avoidable_tokens == 0
    tale.tell(Namespace("other").stream(), msgspec.structs.replace(lost, namespace=Namespace("other")))
    assert total(tale).lost_tokens == 4 * SIZE, "another model's are another event's"


def test_caches_do_not_mix() -> None:
    tale = Tale()
    other = Namespace("m", "salt")
    tale.context("a")
    tale.context("b", namespace=other)
    tale.call("a", keys("1"))
    tale.call("b", keys("1"))
    tale.freed(keys("x"), ("a", 1))
    tale.call("b", keys("x"))
    assert total(tale).regretted_tokens == 0
    tale.call("a", keys("x"))
    assert total(tale).regretted_tokens == SIZE


def test_untracked_inference_is_told_by_model() -> None:
    tale = Tale()
    tale.tell(SPACE.stream(), UntrackedForwarded(at_ns=tale.now, namespace=SPACE, reason="bypass"))
    assert groups_of(tale, "arm")["untracked"].untracked_minutes == 1


def test_the_budget_is_exceeded_by_several_calls_and_given_anew() -> None:
    tale = Tale()
    tale.context("a")
    tale.call("a", keys("1"), prompt=200, cached=0)
    tale.freed(keys("x", "y"), ("a", 2))
    tale.call("a", keys("x"), prompt=10, cached=0)
    assert [h.exceeded for h in told(tale).harm.all(tale.now)] == [False]
    tale.call("a", keys("y"), prompt=10, cached=0)
    (harm,) = told(tale).harm.all(tale.now)
    assert harm.exceeded
    assert (harm.regretted_tokens, harm.prompt_tokens, harm.allowed_tokens) == (2 * SIZE, 220, 2)
    tale.tell(SPACE.stream(), EnforcementRearmed(at_ns=tale.now, namespace=SPACE, tenant="t"))
    assert told(tale).harm.all(tale.now) == []


def test_a_context_that_began_before_the_log_is_made_known() -> None:
    tale = Tale()
    tale.call("story", keys("1"), prompt=5, cached=0)
    begun = story.Story(uid="story")
    report = Report(BUDGET)
    report.know(begun.state)
    for recorded in tale.log:
        report.apply(recorded)
    groups = report.since(0, tale.now).by("tenant")
    assert groups["tenant"].calls == 1
    assert report.chunk_tokens(begun.state.namespace) == SIZE


async def test_lives_through_the_real_books_and_the_real_plan() -> None:
    """One context edits away half of its list; what the plan frees is what the report says."""
    log, clock, cache = MemoryEventLog(), ManualClock(), FakeCache()
    tracker = Tracker(log, clock)
    await tracker.start()
    reclaimer = Reclaimer(tracker, cache, CountedIds(), lambda uid: Mode.ENFORCE, lambda namespace: "")
    report = Report(BUDGET)

    def hear(batch: object) -> None:
        for recorded in batch:  # type: ignore[attr-defined]
            report.apply(recorded)

    tracker.listeners.append(hear)
    agent = Agent(tracker, "a")
    await agent.open()
    await agent.call("s1 u1 a1 u2", "c1")
    before = chain_of("s1 u1 a1 u2")
    cache.store(before)
    await agent.stored(before)
    await agent.call("s1 u3", "c2")
    await agent.call("s1 u3 a3 u4", "c3")
    clock.advance(10)
    for directive, suppressed in reclaimer._planned():
        await reclaimer.propose(directive)
        await reclaimer.execute(directive, suppressed)
    counts = report.since(0, clock.now).by("tenant")["t"]
    after = chain_of("s1 u3")
    lost = sum(before[i : i + 32] != after[i : i + 32] for i in range(0, len(before), 32))
    assert counts.dead_seen_tokens == counts.freed_tokens == lost * story.CHUNK > 0
    assert counts.regretted_tokens == 0
    await agent.call("s1 u1 a1 u2", "c4")
    assert report.since(0, clock.now).total().regretted_tokens == lost * story.CHUNK


def test_contexts_and_calls_without_end_cost_no_memory() -> None:
    tale = Tale()
    for number in range(MAX_CONTEXTS + 10):
        tale.context(f"c{number}", f"t{number}", f"a{number}")
    for number in range(MAX_CALLS + 10):
        arrived = CallArrived(at_ns=tale.now, call_id=f"lost {number}", attempt=1, kept=-1)
        tale.tell(context_stream("c1"), arrived)
    held = told(tale).size()
    assert held["contexts"] == MAX_CONTEXTS
    assert held["calls"] == MAX_CALLS
