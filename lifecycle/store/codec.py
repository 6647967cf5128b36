"""Events as bytes: MessagePack maps that name their type and omit defaults; keys and digests stay raw."""

import zlib
from collections.abc import Mapping

import msgspec

from lifecycle.core.events import Event
from lifecycle.core.upcast import UPCASTS, Upcast, upcast
from lifecycle.errors import CorruptLog, InvalidObservation

_INT64_END = 1 << 63

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def tag_of(event: Event) -> str:
    """The name under which this type of event is recorded, such as `call_ended.v1`."""
    return str(event.__struct_config__.tag)


def encode(event: Event) -> bytes:
    """The event as a log keeps it. Raises `InvalidObservation` for what would not come back the same."""
    if not -_INT64_END <= event.at_ns < _INT64_END:
        raise InvalidObservation(f"at_ns {event.at_ns} of {tag_of(event)} does not fit 64 bits")
    try:
        return _encoder.encode(event)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidObservation(f"{tag_of(event)} cannot be recorded: {error}") from error


def decode(payload: bytes, steps: Mapping[str, Upcast] = UPCASTS) -> Event:
    """The event that `encode` was given; one of an older version comes back in its current form.

    Raises `CorruptLog`, naming the type where it can be read.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _decode_older(payload, steps, error)


def _decode_older(payload: bytes, steps: Mapping[str, Upcast], error: Exception) -> Event:
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as unreadable:
        raise CorruptLog(f"{len(payload)} bytes are not an event: {unreadable}") from unreadable
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise CorruptLog(f"{len(payload)} bytes are not an event: they name no type") from error
    tag = raw["type"]
    if tag not in steps:
        raise CorruptLog(f"event type {tag!r} cannot be decoded: {error}") from error
    try:
        event: Event = msgspec.convert(upcast(raw, steps), Event)
    except (msgspec.ValidationError, LookupError, TypeError, ValueError) as invalid:
        raise CorruptLog(f"event type {tag!r} cannot be brought up to date: {invalid!r}") from invalid
    return event


def checksum(stream: str, version: int, payload: bytes) -> int:
    """CRC-32 of an event and its place: a flipped bit or a misplaced row shows, even if it would decode."""
    return zlib.crc32(payload, zlib.crc32(f"{version}/{stream}".encode()))


def check_stream(stream: str) -> None:
    """Raises `InvalidObservation` for a stream name that is empty or no Unicode text."""
    try:
        stream.encode()
    except UnicodeEncodeError as error:
        raise InvalidObservation(f"stream name {stream!r} is not Unicode text") from error
    if not stream:
        raise InvalidObservation("a stream needs a name")
