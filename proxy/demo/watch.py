"""Looks on while a workload runs: what lies in the cache, what of it is dead, what was freed."""

from collections.abc import Callable, Sequence

from lifecycle.core.directives import Admit, Directive, Reclaim
from lifecycle.core.events import ChunksConfirmed, DirectiveProposed, DirectiveSettled, RecordedEvent
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.vocabulary import DirectiveOutcome
from proxy.demo.results import CallResult, Sample
from proxy.runtime import Runtime

KEYS_PER_LOOK = 5_000
"""Keys that the cache is asked for at once."""


class Watch:
    """Everything that one run shows. `seconds` is the run's own time, simulated or real, from its start.

    A chunk is dead when the cache shows it and no context refers to it. In observe the books forget the dead
    as soon as a plan was made for them, so every key that the cache ever showed is remembered here.
    """

    def __init__(self, runtime: Runtime, namespace: Namespace, seconds: Callable[[], float]) -> None:
        self.samples: list[Sample] = []
        self.calls: list[CallResult] = []
        self.num_failed = 0
        self.num_reclaimed_chunks = 0
        self.num_bypassed_calls = 0
        self._runtime = runtime
        self._namespace = namespace
        self._seconds = seconds
        self._shown: dict[bytes, None] = {}
        self._asked: dict[str, Directive] = {}
        runtime.tracker.listeners.append(self._heard)

    @property
    def num_regretted_tokens(self) -> int:
        """Tokens of chunks that were freed and stand in a later call's prompt."""
        now_ns = self._runtime.clock.now_ns()
        return self._runtime.reporting.report.since(0, now_ns).total().regretted_tokens

    def end(self) -> None:
        """Hear nothing more."""
        self._runtime.tracker.listeners.remove(self._heard)

    async def sample(self) -> None:
        """Look once."""
        shown = list(self._shown)
        resident = dead = 0
        for start in range(0, len(shown), KEYS_PER_LOOK):
            part = shown[start : start + KEYS_PER_LOOK]
            for found in await self._runtime.cache.locate(self._namespace, part):
                copies = len(found.tiers)
                resident += copies
                if not self.is_held(found.key):
                    dead += copies
                    if not copies:
                        # It may be computed again: then the cache shows it again.
                        self._shown.pop(found.key, None)
        chunk_tokens = self._runtime.self_test.chunk_size
        self.samples.append(
            Sample(
                at_seconds=self._seconds(),
                resident_tokens=resident * chunk_tokens,
                dead_tokens=dead * chunk_tokens,
                num_calls=len(self.calls),
                prompt_tokens=sum(call.prompt_tokens for call in self.calls),
                cached_tokens=sum(call.cached_tokens for call in self.calls),
            )
        )

    async def fates(self, keys: Sequence[bytes]) -> tuple[int, int, int]:
        """How many of the keys a context holds, how many are dead and still there, how many are gone."""
        found = await self._runtime.cache.locate(self._namespace, keys)
        held = [self.is_held(each.key) for each in found]
        gone = sum(not (each.tiers or alive) for each, alive in zip(found, held, strict=True))
        return sum(held), len(keys) - sum(held) - gone, gone

    def is_held(self, key: bytes) -> bool:
        """Whether a context refers to the chunk now."""
        return self._runtime.tracker.contexts.index.references(self._namespace, key) > 0

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        for recorded in batch:
            match recorded.event:
                case ChunksConfirmed(keys=keys):
                    self._shown.update(dict.fromkeys(split_keys(keys)))
                case DirectiveProposed(directive=directive):
                    self._asked[directive.directive_id] = directive
                case DirectiveSettled(directive_id=name, result=result):
                    asked = self._asked.get(name)
                    if isinstance(asked, Reclaim):
                        self.num_reclaimed_chunks += len(result.gone) // KEY_BYTES
                    elif isinstance(asked, Admit) and result.outcome is DirectiveOutcome.ACCEPTED:
                        self.num_bypassed_calls += 1
                case _:
                    pass
