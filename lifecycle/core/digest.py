"""Canonical digests: equal values give equal bytes, whatever the process, hash seed or insertion order.

A value is written down unambiguously (a tag, a length, the content) and hashed. Mappings and sets are
ordered by their members' own encoding. A field that holds its default is left out, so that a field added
with a default later does not change the digest of what does not use it.
"""

import struct
from collections.abc import Iterable, Mapping, Set
from functools import cache
from hashlib import blake2b

import msgspec

DIGEST_SIZE = 32
"""Bytes of a canonical digest (BLAKE2b)."""


def digest(value: object) -> bytes:
    """Digest of one value. Raises `TypeError` for what has no canonical form."""
    return digest_all((value,))


def digest_all(values: Iterable[object]) -> bytes:
    """Digest of a sequence of values, taken one by one: the whole never has to be in memory at once."""
    hasher = blake2b(digest_size=DIGEST_SIZE)
    for value in values:
        hasher.update(canonical(value))
    return hasher.digest()


def canonical(value: object) -> bytes:
    """The one byte string that stands for the value: no two different values share it."""
    out = bytearray()
    _write(value, out)
    return bytes(out)


def _write(value: object, out: bytearray) -> None:
    match value:
        case None:
            out += b"N"
        case bool():
            out += b"T" if value else b"F"
        case int():
            out += b"i%d;" % value
        case bytes():
            out += b"b%d:" % len(value)
            out += value
        case str():
            text = value.encode("utf-8", "surrogatepass")
            out += b"s%d:" % len(text)
            out += text
        case float():
            out += b"f"
            out += struct.pack(">d", value)
        case tuple() | list():
            out += b"l%d:" % len(value)
            for item in value:
                _write(item, out)
        case Mapping():
            out += b"m%d:" % len(value)
            for key, item in sorted((canonical(k), v) for k, v in value.items()):
                out += key
                _write(item, out)
        case Set():
            out += b"e%d:" % len(value)
            for member in sorted(map(canonical, value)):
                out += member
        case msgspec.Struct():
            _write_struct(value, out)
        case _:
            raise TypeError(f"no canonical form for {type(value).__name__}")


def _write_struct(value: msgspec.Struct, out: bytearray) -> None:
    kind = type(value)
    out += b"o"
    _write(kind.__struct_config__.tag, out)
    for name, default, factory in _fields(kind):
        content = getattr(value, name)
        if content == (factory() if factory is not None else default):
            continue
        _write(name, out)
        _write(content, out)
    out += b";"


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, object, type | None], ...]:
    """Name, default and default factory of each field, in order of name."""
    found = []
    for field in msgspec.structs.fields(kind):
        factory = None if field.default_factory is msgspec.NODEFAULT else field.default_factory
        found.append((field.name, field.default, factory))
    return tuple(sorted(found, key=lambda field: field[0]))
