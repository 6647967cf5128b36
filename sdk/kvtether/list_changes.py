"""What leads from one list to another: the fewest changes, by messages that are equal."""

import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

MAX_PAIRS = 1_000_000
"""Pairs of messages that are compared at most; beyond, what lies between is one change."""


class Change(NamedTuple):
    """`[start, stop)` gives way to `n` messages; indices count after the changes before."""

    start: int
    stop: int
    n: int


def changes(old: Sequence[Any], new: Sequence[Any]) -> list[Change]:
    """The changes, from the front to the back."""
    first = 0
    shorter = min(len(old), len(new))
    while first < shorter and same(old[first], new[first]):
        first += 1
    last = 0
    while last < shorter - first and same(old[len(old) - 1 - last], new[len(new) - 1 - last]):
        last += 1
    before, after = old[first : len(old) - last], new[first : len(new) - last]
    if not before and not after:
        return []
    if not before or not after or len(before) * len(after) > MAX_PAIRS:
        return [Change(first, first + len(before), len(after))]
    matcher = SequenceMatcher(None, [_key(m) for m in before], [_key(m) for m in after], autojunk=False)
    return [
        Change(first + j1, first + j1 + i2 - i1, j2 - j1)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    ]


def same(old: Any, new: Any) -> bool:
    """Whether a message is the same as another."""
    return old is new or bool(old == new)


def _key(message: Any) -> str:
    return message if isinstance(message, str) else json.dumps(message, sort_keys=True, default=repr)
