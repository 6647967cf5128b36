"""The harm budget: how much of what we removed was needed again, against what the calls prompted.

Only where it was enforced: what a held-out or observed context would have lost harms nobody.
"""

from collections import deque

import msgspec

from lifecycle.projections.report_counts import MINUTE_NS

MAX_PAIRS = 1_000
"""Models and tenants that are counted. Both come from the configuration: it is never reached in earnest."""


class HarmBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How much may be regretted: `share` of the prompt tokens of the last `window_seconds`.

    The prompt tokens count as at least `floor_prompt_tokens`: a quiet hour has an allowance too, and a single
    chunk does not use it up. Fewer than `min_calls` calls that had to compute removed chunks again never
    exceed it: one call is one mistake, whatever its size.
    """

    share: float = 0.001
    window_seconds: float = 3600.0
    floor_prompt_tokens: int = 1_000_000
    min_calls: int = 3


class Harm(msgspec.Struct, frozen=True, kw_only=True):
    """What one model and tenant regretted in the window. `exceeded`: more than the budget allows."""

    model: str
    tenant: str
    regretted_tokens: int
    regretting_calls: int
    prompt_tokens: int
    allowed_tokens: int
    window_seconds: float
    exceeded: bool


class _Minute(msgspec.Struct):
    minute: int
    prompt_tokens: int = 0
    regretted_tokens: int = 0
    calls: int = 0


class _Pair:
    def __init__(self) -> None:
        self.minutes: deque[_Minute] = deque()


class HarmBook:
    """Rolling sums by model and tenant."""

    def __init__(self, budget: HarmBudget) -> None:
        self.budget = budget
        self.regretted_tokens = 0
        """Everybody's since the beginning."""
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def prompted(self, at_ns: int, model: str, tenant: str, num_tokens: int) -> None:
        """An enforced call's prompt."""
        if (pair := self._pair(model, tenant)) is not None:
            self._minute(pair, at_ns).prompt_tokens += num_tokens

    def regretted(self, at_ns: int, model: str, tenant: str, num_tokens: int) -> None:
        """A call needs tokens that were removed for this tenant."""
        self.regretted_tokens += num_tokens
        if (pair := self._pair(model, tenant)) is not None:
            minute = self._minute(pair, at_ns)
            minute.regretted_tokens += num_tokens
            minute.calls += 1

    def rearmed(self, model: str, tenant: str) -> None:
        """An operator gave the budget anew: what was before no longer counts."""
        if (pair := self._pair(model, tenant)) is not None:
            pair.minutes.clear()

    def all(self, now_ns: int) -> list[Harm]:
        """Every pair that prompted or regretted something in the window, in order."""
        found = []
        for (model, tenant), pair in sorted(self._pairs.items()):
            self._forget(pair, now_ns)
            if not pair.minutes:
                continue
            prompt_tokens = sum(m.prompt_tokens for m in pair.minutes)
            regretted_tokens = sum(m.regretted_tokens for m in pair.minutes)
            calls = sum(m.calls for m in pair.minutes)
            allowed = int(self.budget.share * max(prompt_tokens, self.budget.floor_prompt_tokens))
            found.append(
                Harm(
                    model=model,
                    tenant=tenant,
                    regretted_tokens=regretted_tokens,
                    regretting_calls=calls,
                    prompt_tokens=prompt_tokens,
                    allowed_tokens=allowed,
                    window_seconds=self.budget.window_seconds,
                    exceeded=regretted_tokens > allowed and calls >= self.budget.min_calls,
                )
            )
        return found

    def _pair(self, model: str, tenant: str) -> _Pair | None:
        pair = self._pairs.get((model, tenant))
        if pair is None and len(self._pairs) < MAX_PAIRS:
            pair = self._pairs[model, tenant] = _Pair()
        return pair

    def _minute(self, pair: _Pair, at_ns: int) -> _Minute:
        number = at_ns // MINUTE_NS
        self._forget(pair, at_ns)
        if not pair.minutes or pair.minutes[-1].minute < number:
            pair.minutes.append(_Minute(number))
        return pair.minutes[-1]

    def _forget(self, pair: _Pair, now_ns: int) -> None:
        first = (now_ns - int(self.budget.window_seconds * 1e9)) // MINUTE_NS
        while pair.minutes and pair.minutes[0].minute < first:
            pair.minutes.popleft()
