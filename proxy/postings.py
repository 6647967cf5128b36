"""Which contexts carry something, by what they carry: the index behind each kind of evidence."""

from collections.abc import Hashable, Sequence
from itertools import islice

MAX_SIBLINGS = 256
"""Most contexts that one entry answers with."""


class Postings:
    """Contexts by key, in order of arrival. An entry that nobody carries any more is gone."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Hashable, context_id: str) -> None:
        """The context carries the key."""
        self._entries.setdefault(key, {})[context_id] = None

    def remove(self, key: Hashable, context_id: str) -> None:
        """It does not any more; nothing happens if it never did."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.pop(context_id, None)
            if not entry:
                del self._entries[key]

    def get(self, key: Hashable, at_most: int = MAX_SIBLINGS) -> Sequence[str]:
        """Who carries it, the latest first."""
        return tuple(islice(reversed(self._entries.get(key, {})), at_most))
