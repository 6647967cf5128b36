"""A cache at the port, as a test tool: chunks in tiers, and every kind of trouble on request."""

import asyncio
from collections.abc import Callable, Sequence

from engine_bridge.errors import CacheUnavailable
from lifecycle.core.directives import Demote, Directive, DirectiveResult, Reclaim
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.ports import CacheCapabilities, Presence, SelfTest
from lifecycle.vocabulary import DirectiveOutcome, Tier

EVERYTHING = frozenset({"admit", "reclaim", "demote", "pin", "unpin"})
BOTH = frozenset({Tier.L1, Tier.L2})


class FakeCache:
    """Holds `chunks` and does what it is told, unless `failing`, `unreachable` or held by `gate`.

    `asked` is everything that reached it, in order; `reached` and `done` are set with it, before and after.
    """

    def __init__(self, supported: frozenset[str] = EVERYTHING, chunk_size: int = 4) -> None:
        self.chunks: dict[bytes, frozenset[Tier]] = {}
        self.asked: list[Directive] = []
        self.tokens: list[Sequence[int] | None] = []
        self.located: list[Sequence[bytes]] = []
        self.holds: dict[str, bytes] = {}
        self.failing: Exception | None = None
        self.unreachable = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.reached = asyncio.Event()
        self.done = asyncio.Event()
        self.closed = False
        self.tested = SelfTest(ok=True, chunk_size=chunk_size, bytes_per_token=10)
        self._supported = supported

    @property
    def capabilities(self) -> CacheCapabilities:
        return CacheCapabilities(
            driver="fake",
            level=1,
            supported=self._supported,
            unsupported={"pin": "this cache holds nothing"} if "pin" not in self._supported else {},
        )

    def store(self, keys: bytes, tiers: frozenset[Tier] = BOTH) -> None:
        for key in split_keys(keys):
            self.chunks[key] = tiers

    async def self_test(self) -> SelfTest:
        return self.tested

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        self.located.append(keys)
        if self.unreachable:
            raise CacheUnavailable("nobody answers")
        return [Presence(key, self.chunks.get(key, frozenset())) for key in keys]

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        self.asked.append(directive)
        self.reached.set()
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        if isinstance(directive, Reclaim | Demote):
            freed = [key for key in split_keys(directive.keys) if still_dead(key)]
            for key in freed:
                if isinstance(directive, Reclaim):
                    self.chunks.pop(key, None)
                else:
                    self.chunks[key] = frozenset({Tier.L2})
            self.done.set()
            return DirectiveResult(
                outcome=DirectiveOutcome.APPLIED,
                applied=len(freed),
                skipped=len(directive.keys) // KEY_BYTES - len(freed),
                gone=b"".join(freed) if isinstance(directive, Reclaim) else b"",
            )
        self.tokens.append(token_ids())
        pin_id = getattr(directive, "pin_id", "")
        if type(directive).__name__ == "Pin":
            self.holds[pin_id] = directive.keys  # type: ignore[union-attr]
        else:
            self.holds.pop(pin_id, None)
        return DirectiveResult(outcome=DirectiveOutcome.APPLIED, applied=1)

    async def release_all(self) -> int:
        released = len(self.holds)
        self.holds.clear()
        return released

    async def close(self) -> None:
        self.closed = True
