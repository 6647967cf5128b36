"""Of random logs: figures that add up, the same in every order of asking, and found again by a search."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.core.directives import DirectiveResult
from lifecycle.projections.report import Report
from lifecycle.projections.report_counts import DIMENSIONS, Counts
from lifecycle.projections.report_watch import REGRET_NS
from lifecycle.store.codec import decode, encode
from lifecycle.vocabulary import Arm, DirectiveOutcome
from tests.lifecycle.projections.tale import SIZE, SPACE, Tale, keys
from tests.lifecycle.projections.tale_report import BUDGET, told

NAMES = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), NAMES, st.sets(NAMES, min_size=1), st.sampled_from([None, *Arm])),
        st.tuples(st.just("dead"), NAMES, st.sets(NAMES, min_size=1), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 3), st.sets(NAMES), st.booleans()),
        st.tuples(st.just("gone"), NAMES, st.sets(NAMES, min_size=1), st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 59.0, 299.0, 601.0, 4000.0]), st.none(), st.none()),
    ),
    max_size=30,
)


def tale_of(steps: list[tuple[object, ...]]) -> Tale:
    """Random lives of four contexts and four chunks; directives are settled in any order, or never."""
    tale = Tale()
    for n, uid in enumerate("abcd"):
        tale.context(uid, f"t{n % 2}", f"agent{n % 3}")
    tale.call("a", keys("size"))
    under_way: list[tuple[str, set[str]]] = []
    for kind, first, names, flag in steps:
        run = keys(*sorted(names)) if isinstance(names, set) else b""
        if kind == "call":
            tale.call(str(first), run, prompt=9, cached=3, arm=flag, shown=0)  # type: ignore[arg-type]
        elif kind == "dead":
            assert isinstance(names, set)
            under_way.append((tale.dead(run, (str(first), len(names)), demote=bool(flag)), names))
        elif kind == "free" and under_way:
            assert isinstance(names, set)
            assert isinstance(first, int)
            directive, asked = under_way.pop(first % len(under_way))
            if flag:
                tale.settle(directive, DirectiveOutcome.SUPPRESSED)
            else:
                tale.settle(directive, DirectiveOutcome.APPLIED, keys(*sorted(asked & names)))
        elif kind == "gone":
            tale.gone(run)
        elif kind == "wait":
            tale.wait(float(str(first)))
    return tale


@settings(max_examples=80)
@given(STEPS)
def test_every_grouping_adds_up_and_every_dead_token_has_one_end(steps: list[tuple[object, ...]]) -> None:
    tale = tale_of(steps)
    report = told(tale)
    span = report.since(0, tale.now)
    for by in DIMENSIONS:
        summed = Counts()
        for counts in span.by(by).values():
            summed.add(counts)
        assert summed == span.total()
    counts = span.total()
    ends = counts.freed_tokens + counts.evicted_dead_tokens + counts.revived_tokens
    assert counts.dead_seen_tokens == ends + report.watch.num_dead(SPACE) * SIZE
    assert counts.regretted_tokens <= counts.freed_tokens + counts.revived_tokens
    assert counts.would_regret_tokens <= counts.would_free_tokens


@settings(max_examples=40)
@given(STEPS, st.integers(0, 100))
def test_the_log_told_again_through_its_bytes_gives_the_same(
    steps: list[tuple[object, ...]], at: int
) -> None:
    tale = tale_of(steps)
    first, second = told(tale), Report(BUDGET)
    for number, recorded in enumerate(tale.log):
        if number == at:
            second.since(0, recorded.event.at_ns)
        again = decode(encode(recorded.event))
        second.apply(msgspec.structs.replace(recorded, event=again))
    assert first.digest(tale.now) == second.digest(tale.now)


def brute_regret(tale: Tale) -> tuple[int, int]:
    """Regretted and would-be regretted tokens, by looking through the whole log for each removed chunk."""
    events = [r.event for r in tale.log]
    found = {False: 0, True: 0}
    asked = {e.directive.directive_id: e.directive for e in events if hasattr(e, "directive")}
    proposed = {e.directive.directive_id: n for n, e in enumerate(events) if hasattr(e, "directive")}
    last: dict[bytes, tuple[bool, int]] = {}
    for n, event in enumerate(events):
        result = getattr(event, "result", None)
        if isinstance(result, DirectiveResult):
            directive = asked[event.directive_id]  # type: ignore[union-attr]
            suppressed = result.outcome is DirectiveOutcome.SUPPRESSED
            run = directive.keys if suppressed else result.gone  # type: ignore[union-attr]
            since = proposed[event.directive_id]  # type: ignore[union-attr]
            between = b"".join(getattr(e, "keys", b"") for e in events[since:n] if hasattr(e, "first_chunk"))
            for at in range(0, len(run), 32):
                if run[at : at + 32] not in between:
                    last[run[at : at + 32]] = (suppressed, event.at_ns)
                elif not suppressed:
                    found[False] += SIZE
        elif hasattr(event, "first_chunk"):
            for at in range(0, len(event.keys), 32):
                suppressed, when = last.pop(event.keys[at : at + 32], (False, -(10**19)))
                found[suppressed] += SIZE if event.at_ns - when <= REGRET_NS else 0
    return found[False], found[True]


@settings(max_examples=80)
@given(STEPS)
def test_regret_is_what_a_search_through_the_log_finds(steps: list[tuple[object, ...]]) -> None:
    # One directive at a time, as the reclaimer asks: a chunk under way is not asked for again.
    serial = [step for step in steps if step[0] != "free"]
    serial = [
        s
        for step in serial
        for s in ([step, ("free", 0, set("abc"), step[3])] if step[0] == "dead" else [step])
    ]
    tale = tale_of(serial)
    counts = told(tale).since(0, tale.now).total()
    assert (counts.regretted_tokens, counts.would_regret_tokens) == brute_regret(tale)
