"""A list of messages whose operations are told as they happen: to everybody else it is a plain list."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, SupportsIndex

from kvtether.list_changes import changes, same

if TYPE_CHECKING:
    from kvtether.context import Context


class MessageList(list[Any]):
    """The list of a context. Appending tells `append`, assigning `replace`, deleting `remove`.

    What is put in the place of an equal message is no change. A copy, a slice and a sum are plain lists and
    tell nothing. A message changed in its inside is not seen: assign a changed copy. Thread-safe.
    """

    def __init__(self, context: "Context", messages: Iterable[Any] = ()) -> None:
        """`messages` are known to the context already."""
        super().__init__(messages)
        self._context = context

    # -- what adds ----------------------------------------------------------------------------------------

    def append(self, message: Any, /) -> None:
        with self._context.lock:
            super().append(message)
            self._context.append(1)

    def extend(self, messages: Iterable[Any], /) -> None:
        new = list(messages)
        with self._context.lock:
            super().extend(new)
            self._context.append(len(new))

    def __iadd__(self, messages: Iterable[Any], /) -> "MessageList":  # type: ignore[misc]
        self.extend(messages)
        return self

    def __imul__(self, times: SupportsIndex, /) -> "MessageList":
        with self._context.lock:
            self.sync(list(self) * times)
        return self

    def insert(self, index: SupportsIndex, message: Any, /) -> None:
        with self._context.lock:
            at, _, _ = slice(index, None).indices(len(self))
            self[at:at] = [message]

    # -- what changes -------------------------------------------------------------------------------------

    def __setitem__(self, index: SupportsIndex | slice, value: Any, /) -> None:
        with self._context.lock:
            if not isinstance(index, slice):
                at = range(len(self))[index]
                known = self[at]
                super().__setitem__(at, value)
                if known is not value and not same(known, value):
                    self._context.replace(at, at + 1, 1)
            elif index.step not in (None, 1):
                old = list(self)
                super().__setitem__(index, value)
                self._tell(old, self)
            else:
                start, stop, _ = index.indices(len(self))
                old, new = self[start:stop], list(value)
                super().__setitem__(index, new)
                self._tell(old, new, start)

    def reverse(self) -> None:
        with self._context.lock:
            self.sync(self[::-1])

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        with self._context.lock:
            self.sync(sorted(self, key=key, reverse=reverse))

    # -- what removes -------------------------------------------------------------------------------------

    def __delitem__(self, index: SupportsIndex | slice, /) -> None:
        with self._context.lock:
            if isinstance(index, slice):
                gone = sorted(range(len(self))[index])
                super().__delitem__(index)
                for start, stop in reversed(_runs(gone)):
                    self._context.remove(start, stop)
            else:
                at = range(len(self))[index]
                super().__delitem__(at)
                self._context.remove(at, at + 1)

    def pop(self, index: SupportsIndex = -1, /) -> Any:
        with self._context.lock:
            if not self:
                raise IndexError("pop from empty list")
            message = self[index]
            del self[index]
            return message

    def remove(self, message: Any, /) -> None:
        with self._context.lock:
            del self[self.index(message)]

    def clear(self) -> None:
        with self._context.lock:
            del self[:]

    # -- the whole ----------------------------------------------------------------------------------------

    def sync(self, messages: Iterable[Any], key: Callable[[Any], Any] | None = None) -> None:
        """Become this list, and tell the edits that lead there: for lists that somebody else keeps.

        Messages are the same if they are equal; with `key`, such as their id, if what it answers is.
        """
        new = list(messages)
        with self._context.lock:
            old = list(self)
            super().__setitem__(slice(None), new)
            self._tell(old, new, key=key)

    def _tell(
        self, old: list[Any], new: list[Any], at: int = 0, key: Callable[[Any], Any] | None = None
    ) -> None:
        """From index `at` on, `new` stands where `old` stood."""
        for start, stop, n in changes(old, new, key):
            start, stop = start + at, stop + at
            if n == 0:
                self._context.remove(start, stop)
            elif start == self._context.length:
                self._context.append(n)
            else:
                self._context.replace(start, stop, n)

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return deepcopy(list(self), memo)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        return list, (list(self),)


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as half-open spans."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
