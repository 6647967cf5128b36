"""A cache whose holds outlive the process that asked for them, at the port, as a test tool."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from engine_bridge.drivers.lmcache_pins import HeldPin, Reconciled
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.directives import Directive, DirectiveResult, Pin, Unpin
from lifecycle.vocabulary import DirectiveOutcome
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.toy_model import CHUNK


def held_pin(pin_id: str, keys: bytes = b"", lease_until_ns: int = 2**62) -> HeldPin:
    return HeldPin(
        pin_id=pin_id,
        model_name="m",
        salt="",
        world_size=1,
        keys=keys,
        token_ids=b"text",
        lease_until_ns=lease_until_ns,
    )


class HoldingCache(FakeCache):
    """One process's door to `far`, the holds as the cache has them, which several doors share in turn.

    `dies_before_send` and `dies_after_send` end a pin there, as a killed process would. `servers` are the
    incarnations. `compared` is set by each reconcile, of which `found` is the answer to be given, if any.
    """

    def __init__(self, far: dict[str, bytes], chunk_size: int = CHUNK) -> None:
        super().__init__(chunk_size=chunk_size)
        self.far = far
        self.pins: dict[str, HeldPin] = {}
        self.servers: Mapping[str, int] = {"one": 1}
        self.asleep = False
        self.dies_before_send = False
        self.dies_after_send = False
        self.dying = asyncio.Event()
        self.compared = asyncio.Event()
        self.found: Reconciled | None = None
        self._keep: Callable[[], Awaitable[None]] | None = None

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        if isinstance(directive, Pin):
            known = self.pins.get(directive.pin_id)
            self.pins[directive.pin_id] = held_pin(directive.pin_id, directive.keys, directive.lease_until_ns)
            if known is None or known.keys != directive.keys:
                if self._keep is not None:
                    await self._keep()
                if self.dies_before_send:
                    await self._die()
                self.far[directive.pin_id] = directive.keys
                if self.dies_after_send:
                    await self._die()
        elif isinstance(directive, Unpin):
            pin = self.pins.get(directive.pin_id)
            if pin is not None and pin.keys == directive.keys:
                self._let_go(directive.pin_id)
        else:
            return await super().execute(directive, still_dead, token_ids)
        return DirectiveResult(outcome=DirectiveOutcome.APPLIED, applied=1)

    async def _die(self) -> None:
        self.dying.set()
        await asyncio.Event().wait()

    def held_pins(self) -> Sequence[HeldPin]:
        return tuple(self.pins.values())

    def adopt_pins(self, pins: Sequence[HeldPin]) -> None:
        self.pins |= {pin.pin_id: pin for pin in pins}

    def before_pin(self, keep: Callable[[], Awaitable[None]]) -> None:
        self._keep = keep

    async def reconcile(self, now_ns: int, is_wanted: Callable[[HeldPin], bool]) -> Reconciled:
        if self.unreachable:
            self.compared.set()
            raise CacheUnavailable("nobody answers")
        expired = [p for p, pin in self.pins.items() if pin.lease_until_ns <= now_ns]
        orphaned = [p for p, pin in self.pins.items() if p not in expired and not is_wanted(pin)]
        for pin_id in expired + orphaned:
            self._let_go(pin_id)
        restored = [p for p in self.pins if p not in self.far]
        self.far |= {p: self.pins[p].keys for p in restored}
        self.compared.set()
        return self.found or Reconciled(
            expired=tuple(expired), orphaned=tuple(orphaned), restored=tuple(restored)
        )

    async def incarnations(self) -> Mapping[str, int]:
        if self.asleep:
            raise CacheUnavailable("nobody answers")
        return self.servers

    async def release_all(self) -> int:
        if self.unreachable:
            raise CacheUnavailable("nobody answers")
        released = list(self.pins)
        for pin_id in released:
            self._let_go(pin_id)
        return len(released)

    def _let_go(self, pin_id: str) -> None:
        del self.pins[pin_id]
        self.far.pop(pin_id, None)
