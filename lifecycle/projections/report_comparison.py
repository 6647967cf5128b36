"""Held out against enforced: two ratios, their difference, and how sure it is.

The unit of the draw is the context, and calls of one context resemble each other: so the interval treats the
context, not the call, as what was sampled. Linearised ratio estimator with a variance over clusters (Cochran,
Sampling Techniques, 3rd ed., 6.3 and 6.6), Welch's degrees of freedom, Student's quantile by Fisher's
expansion (Abramowitz & Stegun 26.7.5).
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from lifecycle.projections.report_counts import HOUR_NS, HOURS_KEPT
from lifecycle.vocabulary import Arm

CONTEXTS_PER_HOUR = 2_000
"""Contexts of one arm that are kept of each hour: those with the lowest rank, a draw that is the same every
hour and has nothing to do with the one that held them out."""

MIN_CONTEXTS = 30
"""Contexts that each arm needs before anything is said: below, the interval would promise too much."""

_Z = 1.959963984540054


class ContextTally(msgspec.Struct):
    """One context's calls whose tokens and hits the engine told."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Interval(msgspec.Struct, frozen=True):
    """An estimate and its 95 % interval."""

    estimate: float
    low: float
    high: float


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's sums over its contexts."""

    contexts: int
    calls: int
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    computed_tokens_per_call: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Enforced minus held out. Without enough data both differences are None and `missing` says what lacks.

    `mixed_contexts` ran on both arms and are left out.
    """

    from_ns: int
    enforce: ArmSummary
    holdout: ArmSummary
    mixed_contexts: int
    missing: str
    cached_share_difference: Interval | None = None
    computed_tokens_per_call_difference: Interval | None = None


class _Hour:
    """The contexts of one arm and hour with the lowest ranks."""

    def __init__(self) -> None:
        self.tallies: dict[str, ContextTally] = {}
        self.limit = 1 << 64
        self._ranks: list[tuple[int, str]] = []

    def of(self, uid: str) -> ContextTally | None:
        """The context's tally, None if it is not drawn."""
        tally = self.tallies.get(uid)
        if tally is None:
            rank = _rank(uid)
            if rank >= self.limit:
                return None
            tally = self.tallies[uid] = ContextTally()
            heapq.heappush(self._ranks, (-rank, uid))
            if len(self.tallies) > CONTEXTS_PER_HOUR:
                negative, highest = heapq.heappop(self._ranks)
                del self.tallies[highest]
                self.limit = -negative
                if highest == uid:
                    return None
        return tally


class ComparisonBook:
    """Tallies of contexts by arm and hour, as long as they are kept."""

    def __init__(self) -> None:
        self._hours: dict[tuple[int, Arm], _Hour] = {}

    def add(self, at_ns: int, arm: Arm, uid: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A call of the context ended."""
        number = at_ns // HOUR_NS
        hour = self._hours.get((number, arm))
        if hour is None:
            self._hours = {k: h for k, h in self._hours.items() if k[0] > number - HOURS_KEPT}
            hour = self._hours[number, arm] = _Hour()
        tally = hour.of(uid)
        if tally is not None:
            tally.calls += 1
            tally.prompt_tokens += prompt_tokens
            tally.cached_tokens += cached_tokens

    def since(self, start_ns: int) -> Comparison:
        """Both arms from the hour that `start_ns` lies in."""
        first = start_ns // HOUR_NS
        enforce, holdout = self._tallies(first, Arm.ENFORCE), self._tallies(first, Arm.HOLDOUT)
        mixed = enforce.keys() & holdout.keys()
        for uid in mixed:
            del enforce[uid], holdout[uid]
        return compare(list(enforce.values()), list(holdout.values()), first * HOUR_NS, len(mixed))

    def num_contexts(self) -> int:
        """Tallies in memory."""
        return sum(len(hour.tallies) for hour in self._hours.values())

    def _tallies(self, first: int, arm: Arm) -> dict[str, ContextTally]:
        """Contexts that every hour would have drawn, each with all its calls."""
        hours = [hour for (n, a), hour in self._hours.items() if a is arm and n >= first]
        limit = min((hour.limit for hour in hours), default=0)
        out: dict[str, ContextTally] = {}
        for hour in hours:
            for uid, tally in hour.tallies.items():
                if _rank(uid) < limit:
                    total = out.setdefault(uid, ContextTally())
                    total.calls += tally.calls
                    total.prompt_tokens += tally.prompt_tokens
                    total.cached_tokens += tally.cached_tokens
        return out


def compare(
    enforce: Sequence[ContextTally], holdout: Sequence[ContextTally], from_ns: int = 0, mixed: int = 0
) -> Comparison:
    """The two arms side by side, one tally a context."""
    arms = {Arm.ENFORCE: enforce, Arm.HOLDOUT: holdout}
    lacking = [
        f"{len(tallies)} contexts {'enforced' if arm is Arm.ENFORCE else 'held out'}, {MIN_CONTEXTS} needed"
        for arm, tallies in arms.items()
        if len(tallies) < MIN_CONTEXTS
    ]
    share = computed = None
    if not lacking:
        share = _difference(
            [[(t.cached_tokens, t.prompt_tokens) for t in tallies] for tallies in arms.values()]
        )
        computed = _difference(
            [[(t.prompt_tokens - t.cached_tokens, t.calls) for t in tallies] for tallies in arms.values()]
        )
    return Comparison(
        from_ns=from_ns,
        enforce=_summary(enforce),
        holdout=_summary(holdout),
        mixed_contexts=mixed,
        missing="; ".join(lacking),
        cached_share_difference=share,
        computed_tokens_per_call_difference=computed,
    )


def _summary(tallies: Sequence[ContextTally]) -> ArmSummary:
    calls = sum(t.calls for t in tallies)
    prompt, cached = sum(t.prompt_tokens for t in tallies), sum(t.cached_tokens for t in tallies)
    return ArmSummary(
        contexts=len(tallies),
        calls=calls,
        prompt_tokens=prompt,
        cached_tokens=cached,
        cached_share=cached / prompt if prompt else 0.0,
        computed_tokens_per_call=(prompt - cached) / calls if calls else 0.0,
    )


def _difference(arms: Sequence[Sequence[tuple[int, int]]]) -> Interval:
    """First ratio minus second, of sums of pairs, one pair a cluster."""
    (one, var_one), (other, var_other) = (_ratio(pairs) for pairs in arms)
    variance = var_one + var_other
    estimate = one - other
    if not variance:
        return Interval(estimate, estimate, estimate)
    freedom = variance**2 / sum(
        v**2 / (len(pairs) - 1) for v, pairs in zip((var_one, var_other), arms, strict=True)
    )
    half = _student(freedom) * math.sqrt(variance)
    return Interval(estimate, estimate - half, estimate + half)


def _ratio(pairs: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """Ratio of sums and its variance over clusters."""
    pairs = list(pairs)
    below = sum(b for _, b in pairs)
    if not below:
        return 0.0, 0.0
    ratio = sum(a for a, _ in pairs) / below
    num = len(pairs)
    residuals = sum((a - ratio * b) ** 2 for a, b in pairs)
    return ratio, num / (num - 1) * residuals / below**2


def _student(freedom: float) -> float:
    """97.5 % quantile of Student's t, for 5 degrees of freedom and more."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _rank(uid: str) -> int:
    return int.from_bytes(blake2b(uid.encode(), digest_size=8, person=b"kvt sample").digest(), "big")
