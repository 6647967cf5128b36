"""Where the members of a JSON object lie in its bytes, found without building the document.

Tolerant on purpose: the engine's own parser decides what is valid JSON. What this module must get right
is that whatever a parser would accept as a member is found here, escaped names and duplicates included.
"""

import json
import re

import msgspec

_WHITESPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALAR = re.compile(rb'[^ \t\r\n,:"{}\[\]]++')
_ATOM = rb'[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"'
_FLAT = rb"[\[{](?:" + _ATOM + rb")*+[\]}]"
_BRACKET = re.compile(rb"(?:" + _ATOM + rb"|" + _FLAT + rb")*+([\[\]{}])", re.DOTALL)
"""Up to the next bracket that is not part of a container without containers."""

MAX_DEPTH = 100_000
"""Deeper documents count as not scannable: no parser an engine uses goes nearly as deep."""

_QUOTE, _COMMA, _COLON = b'",:'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"


class NotScannable(Exception):
    """The bytes are not one complete JSON object (or array) from the given offset."""


class Member(msgspec.Struct, frozen=True):
    """One `"name": value` of an object, as offsets into the document.

    `[start, name_end)` is the quoted name, `[value_start, end)` the value without surrounding whitespace.
    """

    name: str
    start: int
    value_start: int
    end: int


class ObjectSpan(msgspec.Struct, frozen=True):
    """An object at `[start, end)`, braces included, and its members in document order."""

    start: int
    end: int
    members: tuple[Member, ...]


def scan_object(document: bytes, start: int = 0) -> ObjectSpan:
    """Find the object that begins at `start`, after whitespace. Bytes behind its closing brace are not
    looked at.

    Raises `NotScannable` when there is no object, or it does not end, or is nested beyond `MAX_DEPTH`.
    Linear in its size, no recursion.
    """
    position = _skip_whitespace(document, start)
    if _byte_at(document, position) != _OPEN_OBJECT:
        raise NotScannable(f"no object at offset {position}")
    begin = position
    members: list[Member] = []
    position = _skip_whitespace(document, position + 1)
    if _byte_at(document, position) == _CLOSE_OBJECT:
        return ObjectSpan(begin, position + 1, ())
    while True:
        name_end = _string_end(document, position)
        colon = _skip_whitespace(document, name_end)
        if _byte_at(document, colon) != _COLON:
            raise NotScannable(f"no colon at offset {colon}")
        value_start = _skip_whitespace(document, colon + 1)
        end = _value_end(document, value_start)
        members.append(Member(_decode_name(document[position:name_end]), position, value_start, end))
        position = _skip_whitespace(document, end)
        separator = _byte_at(document, position)
        if separator == _CLOSE_OBJECT:
            return ObjectSpan(begin, position + 1, tuple(members))
        if separator != _COMMA:
            raise NotScannable(f"neither comma nor brace at offset {position}")
        position = _skip_whitespace(document, position + 1)


def scan_array(document: bytes, start: int = 0) -> list[tuple[int, int]]:
    """Spans of the elements of the array that begins at `start`. Raises `NotScannable`."""
    position = _skip_whitespace(document, start)
    if _byte_at(document, position) != _OPEN_ARRAY:
        raise NotScannable(f"no array at offset {position}")
    elements: list[tuple[int, int]] = []
    position = _skip_whitespace(document, position + 1)
    if _byte_at(document, position) == _CLOSE_ARRAY:
        return elements
    while True:
        end = _value_end(document, position)
        elements.append((position, end))
        position = _skip_whitespace(document, end)
        separator = _byte_at(document, position)
        if separator == _CLOSE_ARRAY:
            return elements
        if separator != _COMMA:
            raise NotScannable(f"neither comma nor bracket at offset {position}")
        position = _skip_whitespace(document, position + 1)


def _skip_whitespace(document: bytes, position: int) -> int:
    match = _WHITESPACE.match(document, position)
    return match.end() if match else position


def _byte_at(document: bytes, position: int) -> int:
    if position >= len(document):
        raise NotScannable("the document ends early")
    return document[position]


def _string_end(document: bytes, position: int) -> int:
    match = _STRING.match(document, position)
    if match is None:
        raise NotScannable(f"no string at offset {position}")
    return match.end()


def _value_end(document: bytes, position: int) -> int:
    first = _byte_at(document, position)
    if first == _QUOTE:
        return _string_end(document, position)
    if first in (_OPEN_OBJECT, _OPEN_ARRAY):
        return _container_end(document, position)
    match = _SCALAR.match(document, position)
    if match is None:
        raise NotScannable(f"no value at offset {position}")
    return match.end()


def _container_end(document: bytes, position: int) -> int:
    depth = 1
    position += 1
    while True:
        match = _BRACKET.match(document, position)
        if match is None:
            raise NotScannable("a container does not end")
        position = match.end()
        if document[position - 1] in (_OPEN_OBJECT, _OPEN_ARRAY):
            depth += 1
            if depth > MAX_DEPTH:
                raise NotScannable("nested too deeply")
        else:
            depth -= 1
            if depth == 0:
                return position


def _decode_name(quoted: bytes) -> str:
    try:
        name = json.loads(quoted.decode("utf-8", "surrogatepass"), strict=False)
    except ValueError:
        return quoted[1:-1].decode("latin-1")
    return str(name)
