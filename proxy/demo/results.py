"""What one run of the workload showed, in the units the demo prints: simulated seconds and tokens."""

import statistics
from collections.abc import Sequence

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The books and the tiers at one moment. Counts of calls and tokens are sums since the start.

    `resident_tokens` lie in any tier below the engine's own memory (a chunk in two tiers counts twice, for
    it takes room twice); `dead_tokens` are those of them that no context can hit any more.
    """

    at_seconds: float
    resident_tokens: int
    dead_tokens: int
    num_calls: int
    prompt_tokens: int
    cached_tokens: int


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """One call as its client saw it, times in simulated seconds."""

    at_seconds: float
    ttft_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One moment in the life of a followed context: chunks of its first list, by what became of them."""

    title: str
    text: str
    alive: int
    dead: int
    gone: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One column of the demo. Regretted tokens were freed and asked for again."""

    title: str
    what: str
    samples: Sequence[Sample]
    calls: Sequence[CallResult]
    num_failed: int = 0
    num_reclaimed_chunks: int = 0
    num_regretted_tokens: int = 0
    num_bypassed_calls: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(call.prompt_tokens for call in self.calls)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(call.cached_tokens for call in self.calls)

    @property
    def hit_share(self) -> float:
        """Cached share of all prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def dead_share(self) -> float:
        """Dead share of what is resident, averaged over time; 0 while nothing is."""
        weighted = lasted = 0.0
        for one, following in zip(self.samples, self.samples[1:], strict=False):
            seconds = following.at_seconds - one.at_seconds
            if one.resident_tokens:
                weighted += seconds * one.dead_tokens / one.resident_tokens
            lasted += seconds
        return weighted / lasted if lasted else 0.0

    @property
    def peak_dead_tokens(self) -> int:
        """Most dead tokens that lay in the tiers at once."""
        return max((sample.dead_tokens for sample in self.samples), default=0)

    def ttft_seconds(self, percentile: int) -> float:
        """Percentile (1 to 99) of the time to the first token; 0 without calls."""
        times = [call.ttft_seconds for call in self.calls]
        if len(times) < 2:
            return times[0] if times else 0.0
        return statistics.quantiles(times, n=100, method="inclusive")[percentile - 1]
