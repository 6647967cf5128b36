"""Keeps what the cache holds for us and what we believe of it true, over our restarts and over its own."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
from prometheus_client import Counter

from engine_bridge.drivers.lmcache_pins import HeldPin
from engine_bridge.errors import CacheUnavailable
from engine_bridge.pin_holder import PinHolder, packed, unpacked
from engine_bridge.placement_watch import YoungDirectory
from lifecycle.core.state import chain
from lifecycle.errors import LifecycleError
from lifecycle.ports import CacheControl
from lifecycle.tracker import Tracker

log = structlog.get_logger(__name__)

LOOK_SECONDS = 10.0
"""How often cache servers are asked whether they are still the ones they were."""

LOOKS_TO_RECONCILE = 3


class Vault(Protocol):
    """Keeps bytes by pin id over a restart. Methods raise `LogUnavailable`."""

    async def replace(self, entries: Mapping[str, bytes]) -> None: ...

    async def load(self) -> dict[str, bytes]: ...


class HoldWatch:
    """One loop, and what others call when holds changed. Does nothing for a cache that outlives nobody.

    `changing(uid)` says that the cache is being told of the context's pins right now; `may_repair()` that the
    cache may be touched; `doubt(reason)` has the whole placement looked at; `repairs` counts by `what`.
    """

    def __init__(
        self,
        cache: CacheControl,
        tracker: Tracker,
        changing: Callable[[str], bool],
        may_repair: Callable[[], bool],
        doubt: Callable[[str], None],
        repairs: Counter,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._holder = cache if isinstance(cache, PinHolder) else None
        self._cache = cache
        self._tracker = tracker
        self._changing = changing
        self._may_repair = may_repair
        self._doubt = doubt
        self._repairs = repairs
        self._look_seconds = look_seconds
        self._vault: Vault | None = None
        self._kept: Sequence[HeldPin] = ()
        self._keeping = asyncio.Lock()
        self._servers: Mapping[str, int] = {}
        self._began_ns = 0
        self._drifted: frozenset[str] = frozenset()
        self.num_foreign = 0
        """Objects in our models and salts that somebody else pins, too, by the last comparison."""
        self._put_off = False
        self._wake = asyncio.Event()

    @property
    def num_held(self) -> int:
        """How many pins the cache holds for us, as far as we know."""
        return len(self._holder.held_pins()) if self._holder is not None else 0

    @property
    def num_leaked(self) -> int:
        """How many of them no pin of a context stands behind: given back at the next comparison."""
        held = self._holder.held_pins() if self._holder is not None else ()
        return sum(not self._has_pin(pin) and not self._changing(_owner(pin)) for pin in held)

    async def adopt(self, vault: Vault) -> None:
        """Take over what an earlier run held, and keep in the vault from now on. Raises `LogUnavailable`."""
        pins = unpacked(await vault.load())
        if self._holder is None:
            if pins:
                log.warning("a cache holds pins of an earlier run; without it none is let go", pins=len(pins))
            return
        self._holder.adopt_pins(pins)
        self._vault = vault
        self._kept = tuple(pins)
        self._holder.before_pin(self._keep)
        if pins:
            log.info("pins of an earlier run are ours again", pins=len(pins))

    async def save(self) -> None:
        """Keep what is held now; for whoever changed it. What cannot be kept is kept at the next look."""
        await self._save()
        if self._put_off:
            self._wake.set()

    async def _save(self) -> None:
        try:
            await self._keep()
        except LifecycleError as error:
            log.warning("held pins are kept later", error=str(error))

    async def release_all(self) -> int:
        """Let go what the cache still holds for us; answers how many. Raises `CacheUnavailable`."""
        try:
            return await self._cache.release_all()
        finally:
            await self.save()

    async def run(self) -> None:
        """Until cancelled. A cache that cannot be asked is asked again."""
        if self._holder is None:
            return
        looks = 0
        while True:
            await self._look_at_servers(self._holder)
            if (looks == 0 or self._put_off) and self._may_repair():
                await self.compare()
            await self._save()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_seconds):
                    await self._wake.wait()
            self._wake.clear()
            looks = (looks + 1) % LOOKS_TO_RECONCILE

    async def _look_at_servers(self, holder: PinHolder) -> None:
        try:
            found = await holder.incarnations()
            began_ns = await holder.directory_began_ns() if isinstance(holder, YoungDirectory) else 0
        except CacheUnavailable as error:
            log.warning("cache servers do not say whether they started anew", error=str(error))
            return
        for server, incarnation in self._servers.items():
            if found.get(server) != incarnation:
                log.warning("a cache server started anew or went away", server=server)
                self._doubt(f"cache server {server} is gone or started anew")
        self._servers = found
        if began_ns != self._began_ns and self._began_ns:
            self._put_off = True  # it counts the pins, too, and may have lost them
        self._began_ns = began_ns

    async def compare(self) -> None:
        """Make what the cache holds what it should hold, once."""
        holder = self._holder
        self._put_off = False
        if holder is None or not holder.held_pins():
            self.num_foreign = 0
            return
        try:
            done = await holder.reconcile(self._tracker.clock.now_ns(), self._is_wanted)
        except CacheUnavailable as error:
            log.warning("pins in the cache are compared later", error=str(error))
            return
        drifted = frozenset(done.drifted)
        found = {
            "expired": done.expired,
            "orphaned": done.orphaned,
            "restored": done.restored,
            "surplus": done.surplus,
            "drifted": tuple(sorted(drifted - self._drifted)),
        }
        self._drifted = drifted
        self.num_foreign = done.foreign
        for what, pins in found.items():
            if pins:
                self._repairs.labels(what).inc(len(pins))
                log.warning("pins in the cache were not as they should be", what=what, pins=pins)

    def _is_wanted(self, pin: HeldPin) -> bool:
        """Whether a context has this pin on this chain. While it is under change the question is put off."""
        if "pin" not in self._cache.capabilities.supported:
            return False
        if self._has_pin(pin):
            return True
        changing = self._changing(_owner(pin))
        self._put_off |= changing
        return changing

    def _has_pin(self, pin: HeldPin) -> bool:
        state = self._tracker.contexts.states.get(_owner(pin))
        return state is not None and any(
            each.pin_id == pin.pin_id and chain(state.versions, each.tip) == pin.keys for each in state.pins
        )

    async def _keep(self) -> None:
        if self._holder is None or self._vault is None:
            return
        async with self._keeping:
            pins = tuple(self._holder.held_pins())
            if pins != self._kept:
                await self._vault.replace(packed(pins))
                self._kept = pins


def _owner(pin: HeldPin) -> str:
    """The context whose pin it is."""
    return pin.pin_id.rpartition(":p")[0]
