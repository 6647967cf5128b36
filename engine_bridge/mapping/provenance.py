"""Strings that remember which message each of their characters came from.

A template cuts, joins and moves the strings it is given. `TaggedText` is a `str` whose runs `(length, tag)`
follow it through those operations. A run of length 0 is a mark: it stays where it is put in the text,
through macros and captured blocks, and tells which message a loop is at.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

from engine_bridge.mapping.normalise import Merged, Message

SCAFFOLD = -1
"""Tag of text that the template wrote itself."""

TOOLS = -2
"""Tag of text from the tool definitions."""

Mark = tuple[str, int, int]
"""("enter" | "set" | "exit", loop number, message index or -1)."""

Run = tuple[int, int | Mark]

_COPIED_FIELDS = frozenset(("role", "type", "name", "id", "tool_call_id"))
"""Short identifiers: templates copy them across messages and compare them, which says nothing of
ownership.
"""


class TaggedText(str):
    """Text with runs that cover it exactly."""

    __slots__ = ("runs",)
    runs: list[Run]

    def __new__(cls, text: str, runs: list[Run]) -> "TaggedText":
        tagged = str.__new__(cls, text)
        tagged.runs = runs
        return tagged

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (plain(self),)

    def __copy__(self) -> "TaggedText":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "TaggedText":
        return self

    def __add__(self, other: str) -> "TaggedText":
        if not isinstance(other, str):
            return NotImplemented
        return TaggedText(str.__add__(self, other), self.runs + runs_of(other))

    def __radd__(self, other: str) -> "TaggedText":
        if not isinstance(other, str):
            return NotImplemented
        return TaggedText(str.__add__(other, self), runs_of(other) + self.runs)

    def _cut(self, start: int, end: int) -> "TaggedText":
        """Slice that keeps the marks on both edges."""
        runs: list[Run] = []
        at = 0
        for length, tag in self.runs:
            after = at + length
            if length == 0:
                if start <= at <= end:
                    runs.append((0, tag))
            elif (low := max(at, start)) < (high := min(after, end)):
                runs.append((high - low, tag))
            at = after
        return TaggedText(str.__getitem__(self, slice(start, end)), runs)

    def _recast(self, text: str) -> str:
        """`text`, made of this string in a way that keeps no positions: tagged when there is only one tag."""
        tags = {tag for length, tag in self.runs if length}
        return TaggedText(text, [(len(text), tags.pop())]) if len(tags) == 1 else text

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            if step == 1:
                return self._cut(start, max(start, end))
            return self._recast(str.__getitem__(self, key))
        text = str.__getitem__(self, key)
        index = key.__index__() % len(self)
        return self._cut(index, index + len(text))

    def lstrip(self, chars: str | None = None) -> "TaggedText":
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> "TaggedText":
        return self._cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None) -> "TaggedText":
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> "TaggedText":
        return self._cut(len(prefix), len(self)) if str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str) -> "TaggedText":
        return self._cut(0, len(self) - len(suffix)) if str.endswith(self, suffix) else self

    def _pieces(self, pieces: Sequence[str], separator: str | None) -> list["TaggedText"]:
        cut: list[TaggedText] = []
        at = 0
        for piece in pieces:
            if separator is None:
                at = str.find(self, piece, at)
            cut.append(self._cut(at, at + len(piece)))
            at += len(piece) + len(separator or "")
        return cut

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return list(self._pieces(str.split(self, sep, maxsplit), sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return list(self._pieces(str.rsplit(self, sep, maxsplit), sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        cut: list[str] = []
        at = 0
        for line in str.splitlines(self, True):
            shown = line if keepends else str.splitlines(line)[0]
            cut.append(self._cut(at, at + len(shown)))
            at += len(line)
        return cut

    def partition(self, sep: str) -> tuple[str, str, str]:
        at = str.find(self, sep)
        if at < 0:
            return self, "", ""
        return self[:at], self[at : at + len(sep)], self[at + len(sep) :]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        at = str.rfind(self, sep)
        if at < 0:
            return "", "", self
        return self[:at], self[at : at + len(sep)], self[at + len(sep) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return self._recast(str.replace(self, old, new, count))
        pieces = self._pieces(str.split(self, old, count), old)
        if len(pieces) == 1:
            return self
        out: list[str] = [pieces[0]]
        at = len(pieces[0])
        for piece in pieces[1:]:
            if type(new) is TaggedText:
                out.append(new)
            else:
                replaced = next(
                    (tag for length, tag in self._cut(at, at + len(old)).runs if length), SCAFFOLD
                )
                out.append(TaggedText(new, [(len(new), replaced)]))
            at += len(old) + len(piece)
            out.append(piece)
        return concat(out)

    def upper(self) -> str:
        return self._recast(str.upper(self))

    def lower(self) -> str:
        return self._recast(str.lower(self))

    def title(self) -> str:
        return self._recast(str.title(self))

    def capitalize(self) -> str:
        return self._recast(str.capitalize(self))

    def join(self, iterable: Iterable[str], /) -> str:
        return join(iterable, self)


def plain(text: str) -> str:
    """The same characters as an exact `str`."""
    return text if type(text) is str else str.__getitem__(text, slice(None))


def runs_of(text: str) -> list[Run]:
    """Runs that cover `text`; a string without tags is scaffold."""
    if type(text) is TaggedText:
        return text.runs
    return [(len(text), SCAFFOLD)] if text else []


def concat(pieces: Iterable[str]) -> str:
    """Join without separator, tagged as soon as one piece is."""
    pieces = list(pieces)
    text = "".join(pieces)
    if not any(type(piece) is TaggedText for piece in pieces):
        return text
    return TaggedText(text, [run for piece in pieces for run in runs_of(piece)])


def text_of(value: Any) -> str:
    """`str(value)`, tags kept."""
    return value if isinstance(value, str) else str(value)


def join(values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    """Jinja's `join` filter with tags."""
    out: list[str] = []
    for index, value in enumerate(values):
        if attribute is not None:
            value = value[attribute] if isinstance(value, dict) else getattr(value, str(attribute))
        if index and separator:
            out.append(separator)
        out.append(text_of(value))
    return concat(out)


def tagged_json(to_json: Callable[..., str]) -> Callable[..., str]:
    """A `tojson` whose result carries the tag of its strings, when they all have the same."""

    def convert(value: Any, *args: Any, **kwargs: Any) -> str:
        text = to_json(value, *args, **kwargs)
        tags: set[int | Mark] = set()
        _collect_tags(value, tags)
        tags.discard(SCAFFOLD)
        return TaggedText(text, [(len(text), tags.pop())]) if len(tags) == 1 else text

    return convert


def _collect_tags(value: Any, tags: set[int | Mark]) -> None:
    if type(value) is TaggedText:
        tags.update(tag for length, tag in value.runs if length)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect_tags(key, tags)
            _collect_tags(item, tags)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_tags(item, tags)


class _TaggedList(list[Any]):
    """A list whose printed form carries its strings' tag: templates print content lists by accident."""

    def __str__(self) -> str:
        return _printed(self, list.__repr__(self))


class _TaggedDict(dict[str, Any]):
    """A dict whose printed form carries its strings' tag."""

    def __str__(self) -> str:
        return _printed(self, dict.__repr__(self))


def _printed(value: Any, text: str) -> str:
    tags: set[int | Mark] = set()
    _collect_tags(value, tags)
    return TaggedText(text, [(len(text), tags.pop())]) if len(tags) == 1 else text


def tag_value(value: Any, tag: int) -> Any:
    """Deep copy of JSON data whose strings carry `tag`."""
    if type(value) is str:
        return TaggedText(value, [(len(value), tag)] if value else [])
    if type(value) is dict:
        return _TaggedDict({key: tag_value(item, tag) for key, item in value.items()})
    if type(value) is list:
        return _TaggedList([tag_value(item, tag) for item in value])
    return value


def tag_message(message: Message, owner: int | Merged) -> Message:
    """Copy of a message whose texts carry the client's index."""
    if isinstance(owner, Merged):
        pieces: list[str] = []
        for index, text in owner.parts:
            if pieces:
                pieces.append("\n\n")
            pieces.append(TaggedText(text, [(len(text), index)] if text else []))
        return {**message, "content": concat(pieces)}
    tagged: Message = _tag_fields(message, owner)
    return tagged


def _tag_fields(value: Any, tag: int) -> Any:
    if type(value) is dict:
        return _TaggedDict(
            {key: item if key in _COPIED_FIELDS else _tag_fields(item, tag) for key, item in value.items()}
        )
    if type(value) is list:
        return _TaggedList([_tag_fields(item, tag) for item in value])
    return tag_value(value, tag)


def first_owner(owner: int | Merged) -> int:
    """Client index that scaffold around a message is counted to."""
    return owner.parts[0][0] if isinstance(owner, Merged) else owner
