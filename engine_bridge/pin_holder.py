"""A cache that runs apart from us: its holds outlive us, and its servers start anew while we run."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import structlog

from engine_bridge.drivers.lmcache_pins import HeldPin, Reconciled

log = structlog.get_logger(__name__)


@runtime_checkable
class PinHolder(Protocol):
    """What a `CacheControl` has in addition if its holds must be kept over our restart."""

    def held_pins(self) -> Sequence[HeldPin]:
        """What is held for us, or may be. It names token ids, which are text."""
        ...

    def adopt_pins(self, pins: Sequence[HeldPin]) -> None:
        """Take over the holds of an earlier run."""
        ...

    def before_pin(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Have `keep` awaited before a hold is asked for, when `held_pins` has it. If it raises, none is."""
        ...

    async def reconcile(self, now_ns: int, is_wanted: Callable[[HeldPin], bool]) -> Reconciled:
        """Make the cache hold what is wanted and not over, no more. Raises `CacheUnavailable`."""
        ...

    async def incarnations(self) -> Mapping[str, int]:
        """A number by cache server that changes when the server starts anew. Raises `CacheUnavailable`."""
        ...


def packed(pins: Iterable[HeldPin]) -> dict[str, bytes]:
    """Pins as bytes, by id."""
    return {pin.pin_id: msgspec.msgpack.encode(pin) for pin in pins}


def unpacked(entries: Mapping[str, bytes]) -> list[HeldPin]:
    """Pins from bytes. What this version cannot read is reported and left out."""
    pins = []
    for pin_id, entry in entries.items():
        try:
            pins.append(msgspec.msgpack.decode(entry, type=HeldPin))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            log.error("a held pin cannot be read", pin_id=pin_id, error=str(error))
    return pins
