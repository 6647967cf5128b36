"""What leads from one list to another: the fewest changes, by messages that are the same."""

import json
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, NamedTuple

MAX_PAIRS = 1_000_000
"""Pairs of messages that are compared at most; beyond, what lies between is one change."""


class Change(NamedTuple):
    """`[start, stop)` gives way to `n` messages; indices count after the changes before."""

    start: int
    stop: int
    n: int


def changes(old: Sequence[Any], new: Sequence[Any], key: Callable[[Any], Any] | None = None) -> list[Change]:
    """The changes, from the front to the back. Messages are the same if they are equal, or their keys are."""
    if key is not None:
        old, new = [key(m) for m in old], [key(m) for m in new]
    first = _num_alike(zip(old, new, strict=False))
    left = min(len(old), len(new)) - first
    last = _num_alike(islice(zip(reversed(old), reversed(new), strict=False), left))
    before, after = old[first : len(old) - last], new[first : len(new) - last]
    if not before and not after:
        return []
    if not before or not after or len(before) * len(after) > MAX_PAIRS:
        return [Change(first, first + len(before), len(after))]
    matcher = SequenceMatcher(None, [_text(m) for m in before], [_text(m) for m in after], autojunk=False)
    return [
        Change(first + j1, first + j1 + i2 - i1, j2 - j1)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    ]


def _num_alike(pairs: Iterable[tuple[Any, Any]]) -> int:
    alike = 0
    for old, new in pairs:
        if old is not new and not same(old, new):
            break
        alike += 1
    return alike


def same(old: Any, new: Any) -> bool:
    """Whether a message is the same as another. What cannot be compared is not."""
    try:
        return bool(old == new)
    except (TypeError, ValueError):
        return False


def _text(message: Any) -> str:
    """Equal for equal messages, whatever they are made of."""
    try:
        return json.dumps(message, sort_keys=True, default=repr)
    except (TypeError, ValueError):  # keys that are no text, or a message inside itself
        return repr(message)
