"""Our ledger of L2 pins. The coordinator counts pins without saying whose they are and never ends one.

Pins are held by token ids, which are text: the ledger lives in memory. `held` gives what a caller may keep,
encrypted, over a restart; `adopt` takes it back.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.drivers.lmcache_keys import Layout, ObjectKey, expand
from lifecycle.core.ids import split_keys


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

    def objects(self) -> list[ObjectKey]:
        """What the coordinator counts for it: every rank of every chunk, in object group 0."""
        layout = Layout(world_sizes=frozenset({self.world_size}), object_groups=frozenset({0}))
        return expand(split_keys(self.keys), self.model_name, self.salt, layout)


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """Ledger against coordinator. `expired` and `restored` name pins; `drifted` pins are held in part only,
    which cannot be repaired without touching the pins of others; `foreign` counts pinned objects not ours."""

    expired: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    foreign: int = 0


def expected_counts(pins: Iterable[HeldPin]) -> Counter[ObjectKey]:
    """How often the ledger holds each object."""
    return Counter(key for pin in pins for key in pin.objects())


def missing(pin: HeldPin, counts: Mapping[ObjectKey, int]) -> str:
    """`none`, `all` or `some`: how much of a pin the coordinator does not hold."""
    absent = [counts.get(key, 0) == 0 for key in pin.objects()]
    return "none" if not any(absent) else "all" if all(absent) else "some"


class PinLedger:
    """Holds chains in L2. Methods raise `CacheUnavailable`; a pin whose request failed is not in it."""

    def __init__(self, client: LmcacheClient) -> None:
        self._client = client
        self._pins: dict[str, HeldPin] = {}

    def held(self) -> tuple[HeldPin, ...]:
        return tuple(self._pins.values())

    def adopt(self, pins: Iterable[HeldPin]) -> None:
        """Take over the pins of an earlier run. Known ids are left as they are."""
        for pin in pins:
            self._pins.setdefault(pin.pin_id, pin)

    async def hold(self, pin: HeldPin) -> bool:
        """Pin, or prolong a pin with the same id; False if nothing had to be sent.

        A changed chain is pinned before the old one is let go, so that the common part is held throughout.
        """
        known = self._pins.get(pin.pin_id)
        same = known is not None and (known.keys, known.model_name, known.salt) == (
            pin.keys,
            pin.model_name,
            pin.salt,
        )
        if not same:
            await self._client.pin(pin.tokens(), pin.model_name, pin.world_size, pin.salt)
        self._pins[pin.pin_id] = pin
        if known is not None and not same:
            await self._unpin(known)
        return not same

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

    async def reconcile(self, now_ns: int) -> Reconciled:
        """Release what ran out, pin again what the coordinator forgot, and say what does not add up."""
        expired = tuple(pin.pin_id for pin in self.held() if pin.lease_until_ns <= now_ns)
        for pin_id in expired:
            await self.release(pin_id)
        restored: list[str] = []
        drifted: list[str] = []
        foreign = 0
        for model_name, salt in sorted({(pin.model_name, pin.salt) for pin in self.held()}):
            counts = await self._client.pins(model_name, salt)
            ours = [pin for pin in self.held() if (pin.model_name, pin.salt) == (model_name, salt)]
            expected = expected_counts(ours)
            foreign += sum(count > expected[key] for key, count in counts.items())
            for pin in ours:
                gap = missing(pin, counts)
                if gap == "all":
                    await self._client.pin(pin.tokens(), model_name, pin.world_size, salt)
                    restored.append(pin.pin_id)
                elif gap == "some":
                    drifted.append(pin.pin_id)
        return Reconciled(expired=expired, restored=tuple(restored), drifted=tuple(drifted), foreign=foreign)

    async def _unpin(self, pin: HeldPin) -> None:
        await self._client.unpin(pin.tokens(), pin.model_name, pin.world_size, pin.salt)
