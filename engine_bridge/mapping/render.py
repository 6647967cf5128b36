"""Rendering a message loop again from its first changed iteration.

What an iteration can see is: its message and a bounded look-ahead, the values of named variables at loop
entry, and namespaces (the only thing that Jinja carries from one iteration to the next). When the first two
are unchanged up to iteration r, and the text before the loop is too, the namespaces of a snapshot taken
before iteration r put the template where it was.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Namespace

from engine_bridge.mapping.environment import namespace_attributes

_RECENT_SNAPSHOTS = 8
_SPARSE_SNAPSHOTS = 64


class Snapshot(msgspec.Struct):
    """Namespaces before an iteration, and the character position of its text."""

    position: int
    namespaces: list[dict[str, Any]]


class RenderState(msgspec.Struct):
    """What a render leaves for the next one. `entry` None: the values at loop entry cannot be compared.

    `items` are the message indexes the loop ran over; `snapshots` by iteration.
    """

    before: str
    entry: list[Any] | None
    items: list[int] | range
    snapshots: dict[int, Snapshot]


class _Opaque(msgspec.Struct, frozen=True):
    """Stands for a value at loop entry that is the same in every render: a macro, an undefined name."""

    kind: str


class Resumed(Sequence[Any]):
    """The looped list, entered at iteration `start`."""

    def __init__(self, items: list[Any], start: int) -> None:
        self.items = items
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items[self.start :])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class ResumableLoop(LoopContext):
    """Jinja's loop variable, counting from where a `Resumed` list is entered."""

    def __init__(
        self, iterable: Iterable[Any], undefined: type[Undefined], recurse: Any = None, depth0: int = 0
    ):
        super().__init__(iterable, undefined, recurse, depth0)
        if type(iterable) is Resumed and iterable.start:
            self.index0 = iterable.start - 1
            self._current = iterable.items[iterable.start - 1]


class Recorder:
    """Collects one render's text and answers the calls that the message loop makes.

    `kept` is the length of the previous text that stands; `parts` hold what follows it. The first `common`
    messages are the previous render's. With a state but no way to resume, the render stops at the loop
    (`stopped`). `force_start` resumes there unasked: for a second render that follows a first.
    """

    def __init__(
        self,
        conversation: list[Any],
        state: RenderState | None,
        common: int = 0,
        lookahead: int = 0,
        max_steps: int | None = None,
        force_start: int | None = None,
    ) -> None:
        self.parts: list[str] = []
        self.position = 0
        self.kept = 0
        self.resumed_at: int | None = None
        self.stopped = False
        self.items: Sequence[int] = ()
        self.steps: list[tuple[int, int]] = []
        self.loop_end = 0
        self._conversation = conversation
        self._old = state
        self._common = common
        self._lookahead = lookahead
        self._max_steps = max_steps
        self._force_start = force_start
        self._next = 0
        self._namespaces: list[Namespace] = []
        self._state: RenderState | None = None

    def write(self, chunk: str) -> None:
        if chunk or type(chunk) is not str:
            self.parts.append(chunk)
            self.position += len(chunk)

    def next_state(self) -> RenderState | None:
        return self._state

    def loop(self, sequence: Iterable[Any], free: list[Any]) -> Any:
        """Entry of the message loop: decides where to start."""
        looped = list(sequence)
        self.items = items = _positions(looped, self._conversation)
        self._namespaces = [value for value in free if isinstance(value, Namespace)]
        entry = _entry(free)
        before = "".join(self.parts)
        self._state = RenderState(before=before, entry=entry, items=items, snapshots={})
        start = 0
        if self._old is not None:
            found = self._force_start
            if found is None:
                found = self._resume_point(self._old, before, entry)
            if found is None:
                self.stopped = True
                return ()
            start = found
            if start:
                self._restore(self._old, self._state, start)
            self.parts.clear()
            self.kept = self.position
            self.resumed_at = start
        self._next = start
        return Resumed(looped, start)

    def _restore(self, old: RenderState, new: RenderState, start: int) -> None:
        """Be where the old render was before iteration `start`."""
        snapshot = old.snapshots[start]
        for namespace, attributes in zip(self._namespaces, snapshot.namespaces, strict=True):
            held = namespace_attributes(namespace)
            held.clear()
            held.update(attributes)
        new.snapshots = {at: kept for at, kept in old.snapshots.items() if at <= start}
        self.position = snapshot.position

    def _resume_point(self, old: RenderState, before: str, entry: list[Any] | None) -> int | None:
        """The iteration to start with. If it is the first one, only the text before the loop stands."""
        if old.before != before:
            return None
        start = 0
        if entry is not None and old.entry is not None and _same_all(entry, old.entry):
            unchanged = self._unchanged(old.items)
            start = max((at for at in old.snapshots if at <= unchanged - self._lookahead), default=0)
        if self._max_steps is not None and len(self.items) - start > self._max_steps:
            return None
        return start

    def _unchanged(self, old: Sequence[int]) -> int:
        """How many leading iterations run over the same messages as before."""
        size = min(len(old), len(self.items))
        if old[:size] != self.items[:size]:
            size = next(at for at in range(size) if old[at] != self.items[at])
        same = self.items[:size]
        if isinstance(same, range):
            return max(0, min(size, self._common - same.start))
        return next((at for at in range(size) if not 0 <= same[at] < self._common), size)

    def step(self) -> str:
        """Start of an iteration."""
        assert self._state is not None
        snapshots = self._state.snapshots
        self._snapshot(snapshots)
        old = self._next - _RECENT_SNAPSHOTS
        if old % _SPARSE_SNAPSHOTS:
            snapshots.pop(old, None)
        self.steps.append((self.position, self.items[self._next]))
        self._next += 1
        return ""

    def leave(self) -> str:
        """After the loop, and on the way past it where the loop's branch is taken but the list is empty."""
        if self._state is not None:
            self.loop_end = self.position
            self._snapshot(self._state.snapshots)
        return ""

    def _snapshot(self, snapshots: dict[int, Snapshot]) -> None:
        snapshots[self._next] = Snapshot(
            self.position, [dict(namespace_attributes(held)) for held in self._namespaces]
        )


def _positions(looped: list[Any], conversation: list[Any]) -> list[int] | range:
    """Index in the conversation of each looped item, -1 for what is no message. A range for a tail of the
    list.
    """
    skipped = len(conversation) - len(looped)
    if skipped >= 0 and all(map(operator.is_, looped, itertools.islice(conversation, skipped, None))):
        return range(skipped, len(conversation))
    indexes = {id(message): index for index, message in enumerate(conversation)}
    return [indexes.get(id(item), -1) for item in looped]


def _entry(free: list[Any]) -> list[Any] | None:
    """Comparable copies of the values at loop entry, None if one of them is used up by reading."""
    entry: list[Any] = []
    for value in free:
        if isinstance(value, Namespace):
            entry.append(dict(namespace_attributes(value)))
        elif isinstance(value, Undefined | Macro):
            entry.append(_Opaque(type(value).__name__))
        elif hasattr(value, "__next__") or callable(value):
            return None
        else:
            entry.append(value)
    return entry


def _same_all(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(_same, left, right))


def _same(left: Any, right: Any) -> bool:
    """Equality as a template can observe it: types count (1, True and 1.0 print differently), so does key
    order.
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            _same(one, other) and _same(left[one], right[other])
            for one, other in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return _same_all(left, right)
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, str | int | bool | _Opaque):
        return bool(left == right)
    return False
