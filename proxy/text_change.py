"""In what two texts differ, as a category: nothing of the texts themselves goes out of here."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lifecycle.vocabulary import PrefixBreak
from proxy.normalisers import BILLING_MARK

MAX_COMPARED = 200_000
"""Characters from the first difference to the last that are looked at; more is no small difference."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\.?"
_ZONE = r"(?:\s*(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))*(?:\s*\([a-z ]+\))?"

_BILLING = re.compile(rf"{BILLING_MARK}[ \t]*(?:[A-Za-z_]\w*=[^;\s]*;?[ \t]*)*")
_MOMENT = re.compile(
    rf"(?i:\b{_WEEKDAY}\b,?\s*"
    rf"|\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s+\d{{4}}\b)?"
    rf"|\b\d{{1,2}}\.?\s+{_MONTH}(?:\s+\d{{4}}\b)?"
    r"|\b\d{4}-\d{1,2}-\d{1,2}(?:T(?=\d))?|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"
    rf"|(?<!\d)\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s*[ap]\.?m\b\.?)?{_ZONE}"
    r"|\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b)"
)
_COUNTDOWN_LINE = re.compile(r"^[^\n]*\b(?i:tokens?|context|budget)\b[^\n]*$", re.MULTILINE)
_RANDOM_ID = re.compile(r"\b(?=[\w-]{0,40}\d)(?=[\w-]{0,40}[A-Za-z])[A-Za-z0-9_-]{8,}\b|(?<==)[0-9a-f]{4,}\b")
_NUMBER = re.compile(r"\d(?:[\d.,]*\d)?")


def _without_numbers(text: str) -> str:
    return _NUMBER.sub("#", text)


_MASKS: Sequence[tuple[PrefixBreak, Callable[[str], str]]] = (
    (PrefixBreak.BILLING, lambda text: _BILLING.sub("#", text)),
    (PrefixBreak.TIMESTAMP, lambda text: _MOMENT.sub("#", text)),
    (PrefixBreak.COUNTDOWN, lambda text: _COUNTDOWN_LINE.sub(lambda line: _without_numbers(line[0]), text)),
    (PrefixBreak.NONCE, lambda text: _RANDOM_ID.sub("#", text)),
    (PrefixBreak.COUNTER, _without_numbers),
)
"""What is made equal, one after the other, until the texts are: the last one needed names the difference."""

_HEAD_FIELDS = ("system", "instructions")


def text_change(old: str, new: str) -> PrefixBreak | None:
    """The category of a difference that is in nothing but one of these: billing line, date or time, token
    countdown, random id, number. None for any other, and for none."""
    old, new = _between(old, new)
    if old == new or max(len(old), len(new)) > MAX_COMPARED:
        return None
    for kind, mask in _MASKS:
        old, new = mask(old), mask(new)
        if old == new:
            return kind
    return None


def head_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> PrefixBreak:
    """What stands before the messages of two request bodies differs in this."""
    tools = tools_change(old.get("tools"), new.get("tools"))
    if tools is not None:
        return tools
    before, after = head_text(old), head_text(new)
    if before != after:
        return text_change(before, after) or PrefixBreak.SYSTEM
    return PrefixBreak.SETTINGS


def tools_change(old: object, new: object) -> PrefixBreak | None:
    """Whether two lists of tools differ, and if only in their order."""
    if old == new:
        return None
    if (
        isinstance(old, list)
        and isinstance(new, list)
        and sorted(map(_spelled, old)) == sorted(map(_spelled, new))
    ):
        return PrefixBreak.TOOLS_ORDER
    return PrefixBreak.TOOLS


def head_text(document: Mapping[str, Any]) -> str:
    """The system prompt that a request body has beside its messages."""
    return flat_text([document.get(name) for name in _HEAD_FIELDS])


def flat_text(value: object) -> str:
    """Every text and number in a JSON value, in order of names, each on lines of its own."""
    return "\n".join(_leaves(value))


def _leaves(value: object, depth: int = 0) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name in sorted(value):
            if name != "cache_control" and depth < _MAX_DEPTH:
                yield name
                yield from _leaves(value[name], depth + 1)
    elif isinstance(value, list):
        for item in value if depth < _MAX_DEPTH else ():
            yield from _leaves(item, depth + 1)
    elif value is not None:
        yield str(value)


_MAX_DEPTH = 32


def _between(old: str, new: str) -> tuple[str, str]:
    """Both texts without the whole lines that they begin and end with together."""
    first = _shared(old, new)
    start = old.rfind("\n", 0, first) + 1
    old, new = old[start:], new[start:]
    last = _shared(old[::-1], new[::-1])
    end = old.find("\n", len(old) - last)
    behind = 0 if end < 0 else len(old) - end
    return old[: len(old) - behind], new[: len(new) - behind]


def _shared(one: str, other: str) -> int:
    """How many characters both begin with, in O(log n) comparisons of slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _spelled(tool: object) -> bytes:
    try:
        return msgspec.json.encode(tool, order="sorted")
    except (ValueError, OverflowError, RecursionError, UnicodeError):
        return repr(tool).encode("utf-8", "surrogatepass")
