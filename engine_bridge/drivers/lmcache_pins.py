"""Our ledger of L2 pins. The coordinator counts pins without saying whose they are and never ends one.

Pins are held by token ids, which are text: the ledger lives in memory. `held` gives what a caller may keep,
encrypted, over a restart; `adopt` takes it back. A pin stands in the ledger from before its request is sent
until after the request that lets it go was answered, and `before_pin` gives the caller time to keep it: a
process that dies in between knows at its next start what it may hold, and the counts tell whether it does.
"""

from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.drivers.lmcache_keys import Layout, ObjectKey, expand
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.ids import split_keys

LEFT = "-left"
"""Ends the id of what may be held and is to go: the old chain of a pin that moved, a failed request."""


class HeldPin(msgspec.Struct, frozen=True, kw_only=True):
    """One pin of ours: what was sent to the coordinator, and until when we want it.

    `keys` is the run of the chain's chunk keys, `token_ids` the tokens they were computed from as
    little-endian unsigned 32-bit integers.
    """

    pin_id: str
    model_name: str
    salt: str
    world_size: int
    keys: bytes
    token_ids: bytes
    lease_until_ns: int

    def tokens(self) -> Sequence[int]:
        return array("I", self.token_ids)

    def holds_same(self, other: "HeldPin") -> bool:
        """Whether the coordinator counts both for the same objects."""
        mine = (self.keys, self.model_name, self.salt, self.world_size)
        return mine == (other.keys, other.model_name, other.salt, other.world_size)

    def objects(self) -> list[ObjectKey]:
        """What the coordinator counts for it: every rank of every chunk, in object group 0."""
        layout = Layout(world_sizes=frozenset({self.world_size}), object_groups=frozenset({0}))
        return expand(split_keys(self.keys), self.model_name, self.salt, layout)


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """Ledger against coordinator, by pin id.

    `expired` ran out; `orphaned` were wanted by nobody any more; `restored` were pinned again; `drifted` are
    held in part only, which cannot be repaired without touching the pins of others; `surplus` were held more
    often than we asked for, and are not any more. `foreign` counts objects that others hold.
    """

    expired: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()
    foreign: int = 0


def expected_counts(pins: Iterable[HeldPin]) -> Counter[ObjectKey]:
    """How often the ledger holds each object."""
    return Counter(key for pin in pins for key in pin.objects())


def missing(pin: HeldPin, counts: Mapping[ObjectKey, int], expected: Mapping[ObjectKey, int]) -> str:
    """`none`, `all` or `some`: how many of a pin's objects are counted less often than all pins together ask.

    Pins share prefixes. Of pins that may be the missing one the longest is: nothing but it covers its end.
    """
    absent = [counts.get(key, 0) < expected[key] for key in pin.objects()]
    return "none" if not any(absent) else "all" if all(absent) else "some"


async def _nothing_to_keep() -> None:
    return None


def _wants_all(pin: HeldPin) -> bool:
    return True


class PinLedger:
    """Holds chains in L2. Methods raise `CacheUnavailable`.

    A pin whose request failed may be held or not: it stays under an id that nobody wants until the counts
    tell. `before_pin` is awaited before a pin is sent; what it raises leaves the pin unsent.
    """

    def __init__(self, client: LmcacheClient) -> None:
        self._client = client
        self._pins: dict[str, HeldPin] = {}
        self._too_often: frozenset[str] = frozenset()
        self.before_pin: Callable[[], Awaitable[None]] = _nothing_to_keep

    def held(self) -> tuple[HeldPin, ...]:
        return tuple(self._pins.values())

    def find(self, pin_id: str) -> HeldPin | None:
        return self._pins.get(pin_id)

    def adopt(self, pins: Iterable[HeldPin]) -> None:
        """Take over the pins of an earlier run. Known ids are left as they are."""
        for pin in pins:
            self._pins.setdefault(pin.pin_id, pin)

    async def hold(self, pin: HeldPin) -> bool:
        """Pin, or prolong a pin with the same id; False if nothing had to be sent.

        A changed chain is pinned before the old one is let go, so that the common part is held throughout.
        An old chain that cannot be let go stays in the ledger, under an id that nobody wants.
        """
        known = self._pins.get(pin.pin_id)
        if known is not None and known.holds_same(pin):
            self._pins[pin.pin_id] = pin
            return False
        left = self._set_aside(known) if known is not None else ""
        self._pins[pin.pin_id] = pin
        try:
            await self.before_pin()
        except Exception:
            self._restore(pin.pin_id, known, left)
            raise
        try:
            await self._send(pin)
        except CacheUnavailable:
            self._restore(pin.pin_id, known, left)
            self._set_aside(pin)
            raise
        if left:
            await self.release(left)
        return True

    def _restore(self, pin_id: str, known: HeldPin | None, left: str) -> None:
        self._pins.pop(left, None)
        if known is None:
            del self._pins[pin_id]
        else:
            self._pins[pin_id] = known

    def _set_aside(self, pin: HeldPin) -> str:
        left = pin.pin_id + LEFT
        while left in self._pins:
            left += LEFT
        self._pins[left] = msgspec.structs.replace(pin, pin_id=left)
        return left

    async def release(self, pin_id: str, keys: bytes = b"") -> int:
        """Let a pin go; answers its chunks, 0 for an unknown id.

        With `keys` only if it still holds that chain: one that moved let the old chain go when it did.
        """
        pin = self._pins.get(pin_id)
        if pin is None or (keys and keys != pin.keys):
            return 0
        await self._unpin(pin)
        del self._pins[pin_id]
        return len(split_keys(pin.keys))

    async def release_all(self) -> int:
        """Let every pin of the ledger go; answers how many."""
        released = 0
        for pin_id in list(self._pins):
            await self.release(pin_id)
            released += 1
        return released

    async def reconcile(self, now_ns: int, is_wanted: Callable[[HeldPin], bool] = _wants_all) -> Reconciled:
        """Let go what ran out or is not wanted, pin again what was forgotten, say what does not add up.

        A pin that is to go and that the coordinator does not hold is only forgotten: to unpin it would take
        from another pin with the same prefix. A pin that is held more often than it was asked for, twice in a
        row, is let go down to that, unless anything outside our chains is pinned too: then somebody else pins
        here, and the surplus may be theirs.
        """
        done = Reconciled()
        too_often: set[str] = set()
        for model_name, salt in sorted({(pin.model_name, pin.salt) for pin in self.held()}):
            part = await self._reconcile(model_name, salt, now_ns, is_wanted, too_often)
            done = Reconciled(
                expired=done.expired + part.expired,
                orphaned=done.orphaned + part.orphaned,
                restored=done.restored + part.restored,
                drifted=done.drifted + part.drifted,
                surplus=done.surplus + part.surplus,
                foreign=done.foreign + part.foreign,
            )
        self._too_often = frozenset(too_often)
        return done

    async def _reconcile(
        self,
        model_name: str,
        salt: str,
        now_ns: int,
        is_wanted: Callable[[HeldPin], bool],
        too_often: set[str],
    ) -> Reconciled:
        counts = Counter(await self._client.pins(model_name, salt))
        ours = [pin for pin in self.held() if (pin.model_name, pin.salt) == (model_name, salt)]
        ours.sort(key=lambda each: len(each.keys), reverse=True)
        expected = expected_counts(ours)
        expired: list[str] = []
        orphaned: list[str] = []
        restored: list[str] = []
        for pin in ours:
            is_over = pin.lease_until_ns <= now_ns
            is_held = missing(pin, counts, expected) != "all"
            if is_over or not is_wanted(pin):
                if is_held:
                    await self._unpin(pin)
                    counts.subtract(pin.objects())
                del self._pins[pin.pin_id]
                expected.subtract(pin.objects())
                (expired if is_over else orphaned).append(pin.pin_id)
            elif not is_held:
                await self._send(pin)
                counts.update(pin.objects())
                restored.append(pin.pin_id)
        surplus = await self._let_go_surplus(ours, counts, expected, too_often)
        return Reconciled(
            expired=tuple(expired),
            orphaned=tuple(orphaned),
            restored=tuple(restored),
            surplus=tuple(surplus),
            drifted=tuple(
                pin.pin_id
                for pin in ours
                if pin.pin_id in self._pins and missing(pin, counts, expected) != "none"
            ),
            foreign=sum(count > expected[key] for key, count in counts.items()),
        )

    async def _let_go_surplus(
        self,
        ours: Iterable[HeldPin],
        counts: Counter[ObjectKey],
        expected: Mapping[ObjectKey, int],
        too_often: set[str],
    ) -> list[str]:
        """Longest chains first: nothing but a chain of its own holds their ends."""
        over = {key for key, count in counts.items() if count > expected.get(key, 0)}
        if any(not expected.get(key) for key in over):
            return []
        let_go: list[str] = []
        for pin in ours:
            while pin.pin_id in self._pins and all(counts[key] > expected[key] for key in pin.objects()):
                if pin.pin_id not in self._too_often:
                    too_often.add(pin.pin_id)
                    break
                await self._unpin(pin)
                counts.subtract(pin.objects())
                let_go.append(pin.pin_id)
        return let_go

    async def _send(self, pin: HeldPin) -> None:
        await self._client.pin(pin.tokens(), pin.model_name, pin.world_size, pin.salt)

    async def _unpin(self, pin: HeldPin) -> None:
        await self._client.unpin(pin.tokens(), pin.model_name, pin.world_size, pin.salt)
