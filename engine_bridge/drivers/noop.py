"""Level 0: no control over any cache. Everything is unsupported, and says so."""

from collections.abc import Callable, Sequence

from lifecycle.core.directives import Directive, DirectiveResult
from lifecycle.core.ids import Namespace
from lifecycle.ports import CacheCapabilities, Presence, SelfTest
from lifecycle.vocabulary import DirectiveOutcome

DIRECTIVES = ("admit", "reclaim", "demote", "pin", "unpin")


class NoCacheControl:
    """Observes only. `reason` says why there is no control, in words for an operator."""

    def __init__(self, reason: str = "no cache is configured for this model") -> None:
        self._reason = reason

    @property
    def capabilities(self) -> CacheCapabilities:
        return CacheCapabilities(
            driver="noop", level=0, supported=frozenset(), unsupported=dict.fromkeys(DIRECTIVES, self._reason)
        )

    async def self_test(self) -> SelfTest:
        """Never ok: without control there is nothing but observing."""
        return SelfTest(ok=False, problems=(self._reason,))

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        """Every key with no tier: nobody told us of any."""
        return [Presence(key, frozenset()) for key in keys]

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        return DirectiveResult(outcome=DirectiveOutcome.UNSUPPORTED, reason=self._reason)

    async def release_all(self) -> int:
        return 0

    async def close(self) -> None:
        return None
