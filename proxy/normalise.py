"""Opt-in edits of a request's own content, as spans of its bytes: whatever is not named leaves as it came.

The calls are read from what comes out here, so that their prompts are mapped as the engine gets them.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import structlog

from lifecycle.vocabulary import Mode
from proxy.body_edit import OFF_LOOP_BYTES, UTF8_BOM, Splice, as_utf8, splice
from proxy.config import Config
from proxy.followed_call import NotFollowed, decode_body
from proxy.json_members import NotScannable, scan_array, scan_object
from proxy.normalisers import Normaliser, TextEdit, Voice, edited, edits, may_apply

log = structlog.get_logger(__name__)

Path: TypeAlias = tuple[str | int, ...]
"""Where a value lies in a document: names of members and numbers of elements."""

KindsOf: TypeAlias = Callable[[str], Sequence[Normaliser]]
"""The normalisers that a model asks for, by the name that a body gives it."""

_ESCAPE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.")
"""What stands for one character: half a surrogate pair alone does, both together are one."""

_SYSTEM_ROLES = ("system", "developer")
_TEXT_PARTS = ("text", "input_text")


class Normalised(msgspec.Struct, frozen=True):
    """The body to go on with, and how often each normaliser changed it."""

    body: bytes
    counts: Mapping[Normaliser, int] = {}


class _Spot(msgspec.Struct, frozen=True):
    """A text of a document. `in_list` says that its object is one of several in a list."""

    path: Path
    voice: Voice
    text: str
    in_list: bool = False


def normalise(path: str, body: bytes, kinds_of: KindsOf) -> Normalised:
    """Apply what the body's model asks for. A body that is not read here, or in which nothing is found,
    comes back as it is; so does a text that cannot be edited exactly."""
    spots = _SPOTS.get(path)
    document = as_utf8(body)
    if spots is None or document is None:
        return Normalised(body)
    try:
        decoded = decode_body(document)
    except NotFollowed:
        return Normalised(body)
    if not isinstance(decoded, dict):
        return Normalised(body)
    model = decoded.get("model")
    kinds = kinds_of(model if isinstance(model, str) else "")
    counts: Counter[Normaliser] = Counter()
    places = _Places(document)
    splices: list[Splice] = []
    dropped: dict[Path, set[int]] = {}
    for spot in spots(decoded) if kinds else ():
        found = edits(kinds, spot.voice, spot.text)
        if not found:
            continue
        changes = [change for _, change in found]
        if spot.in_list and not edited(spot.text, changes):
            dropped.setdefault(spot.path[:-2], set()).add(_number(spot.path[-2]))
        elif (cut := places.edit(spot, changes)) is not None:
            splices.append(cut)
        else:
            continue
        counts.update(kind for kind, _ in found)
    try:
        splices += [each for at, gone in dropped.items() for each in places.without(at, gone)]
    except (NotScannable, LookupError):
        return Normalised(body)
    return Normalised(splice(document, splices), dict(counts)) if splices else Normalised(body)


class Normalising:
    """What the configuration asks for, by model. Never in bypass: `mode_of` tells by model and tenant.

    `served` names the model that a body means. `changed` is told every normaliser that changed a body, once
    for each place.
    """

    def __init__(
        self,
        config: Config,
        served: Callable[[str], str],
        mode_of: Callable[[str, str], Mode],
        changed: Callable[[Normaliser, int], None],
    ) -> None:
        self._common = config.normalise
        self._by_model = {m.name: m.normalise for m in config.models if m.normalise is not None}
        self._every = tuple({kind for own in (self._common, *self._by_model.values()) for kind in own})
        self._served = served
        self._mode_of = mode_of
        self._changed = changed

    async def body(self, path: str, tenant: str, given: bytes) -> Normalised:
        """The body to go on with, edited off the event loop if it is large; not even read where nothing could
        apply. Never raises: what goes wrong leaves it as it came."""
        if path not in _SPOTS or not may_apply(self._every, given):
            return Normalised(given)
        try:
            if len(given) > OFF_LOOP_BYTES:
                result = await asyncio.to_thread(normalise, path, given, lambda m: self._kinds(m, tenant))
            else:
                result = normalise(path, given, lambda m: self._kinds(m, tenant))
        except Exception:
            log.exception("a body is not normalised", path=path)
            return Normalised(given)
        for kind, times in result.counts.items():
            self._changed(kind, times)
        return result

    def _kinds(self, named: str, tenant: str) -> Sequence[Normaliser]:
        model = self._served(named)
        if self._mode_of(model, tenant) is Mode.BYPASS:
            return ()
        # A model that the configuration does not name is the engine's first, whatever it is called.
        return self._by_model.get(model, self._by_model.get("", self._common))


class _Places:
    """Where the values of a document lie in its bytes; what was scanned once is remembered."""

    def __init__(self, document: bytes) -> None:
        self._document = document
        self._members: dict[int, dict[str, tuple[int, int]]] = {}
        self._elements: dict[int, list[tuple[int, int]]] = {}
        start = len(UTF8_BOM) if document.startswith(UTF8_BOM) else 0
        self._root = (start, len(document))

    def edit(self, spot: _Spot, changes: Sequence[TextEdit]) -> Splice | None:
        """The edit of a text's own literal, None if that would not read as it should."""
        try:
            start, end = self._find(spot.path)
        except (NotScannable, LookupError):
            return None
        literal = self._document[start:end]
        cuts = _offsets(literal, [at for change in changes for at in (change.start, change.end)])
        pairs = zip(cuts[::2], cuts[1::2], strict=True)
        fresh = splice(
            literal,
            [(lo, hi, change.text.encode()) for (lo, hi), change in zip(pairs, changes, strict=True)],
        )
        if _read(literal) != spot.text or _read(fresh) != edited(spot.text, changes):
            return None
        return start, end, fresh

    def without(self, path: Path, gone: set[int]) -> Iterator[Splice]:
        """Edits that take elements out of a list of which something stays, each with one comma."""
        spans = self._list_at(self._find(path)[0])
        kept_before = False
        for number, (start, end) in enumerate(spans):
            if number not in gone:
                kept_before = True
            elif kept_before:
                yield spans[number - 1][1], end, b""
            else:
                yield start, spans[number + 1][0], b""

    def _find(self, path: Path) -> tuple[int, int]:
        at = self._root
        for step in path:
            at = self._list_at(at[0])[step] if isinstance(step, int) else self._object_at(at[0])[step]
        return at

    def _list_at(self, start: int) -> list[tuple[int, int]]:
        if start not in self._elements:
            self._elements[start] = scan_array(self._document, start)
        return self._elements[start]

    def _object_at(self, start: int) -> dict[str, tuple[int, int]]:
        """Of members of one name the last, as parsers take them."""
        if start not in self._members:
            found = scan_object(self._document, start).members
            self._members[start] = {member.name: (member.value_start, member.end) for member in found}
        return self._members[start]


def _offsets(literal: bytes, positions: Sequence[int]) -> list[int]:
    """Where characters of a JSON string begin in its literal; `positions` rise."""
    found: list[int] = []
    units = _ESCAPE.finditer(literal, 1, len(literal) - 1)
    at, characters = 1, 0
    plain, unit = _plain_run(literal, at, next(units, None))
    for wanted in positions:
        while unit is not None and wanted > characters + len(plain):
            characters += len(plain) + 1
            at = unit.end()
            plain, unit = _plain_run(literal, at, next(units, None))
        before = plain[: wanted - characters]
        found.append(at + len(before.encode("utf-8", "surrogatepass")))
    return found


def _plain_run(
    literal: bytes, start: int, unit: re.Match[bytes] | None
) -> tuple[str, re.Match[bytes] | None]:
    end = unit.start() if unit is not None else len(literal) - 1
    return literal[start:end].decode("utf-8", "surrogatepass"), unit


def _read(literal: bytes) -> object:
    try:
        return json.loads(literal.decode("utf-8", "surrogatepass"), strict=False)
    except ValueError:
        return None


def _number(step: str | int) -> int:
    if not isinstance(step, int):
        raise TypeError(f"{step!r} is no place in a list")
    return step


def _chat_spots(document: Mapping[str, Any]) -> Iterator[_Spot]:
    yield from _message_spots("messages", document)


def _responses_spots(document: Mapping[str, Any]) -> Iterator[_Spot]:
    yield from _content_spots(("instructions",), Voice.SYSTEM, document.get("instructions"))
    yield from _content_spots(("input",), Voice.USER, document.get("input"), lists=False)
    yield from _message_spots("input", document)


def _messages_spots(document: Mapping[str, Any]) -> Iterator[_Spot]:
    yield from _content_spots(("system",), Voice.SYSTEM, document.get("system"))
    yield from _message_spots("messages", document)


def _message_spots(name: str, document: Mapping[str, Any]) -> Iterator[_Spot]:
    """Texts of system, developer and user messages. Tool results, answers and reasoning are none."""
    messages = document.get(name)
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict) or message.get("type", "message") != "message":
            continue
        role = message.get("role")
        if role in _SYSTEM_ROLES or role == "user":
            voice = Voice.USER if role == "user" else Voice.SYSTEM
            yield from _content_spots((name, number, "content"), voice, message.get("content"))


def _content_spots(path: Path, voice: Voice, content: object, lists: bool = True) -> Iterator[_Spot]:
    if isinstance(content, str):
        yield _Spot(path, voice, content)
        return
    parts = content if isinstance(content, list) and lists else ()
    texts = [
        (number, part["text"])
        for number, part in enumerate(parts)
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
    ]
    for number, text in texts:
        # Of a list of texts alone the last stays, whatever is left of it: an empty list is no content.
        in_list = voice is Voice.SYSTEM and number < len(parts) - 1
        yield _Spot((*path, number, "text"), voice, text, in_list)


_SPOTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[_Spot]]] = {
    "/v1/chat/completions": _chat_spots,
    "/v1/messages": _messages_spots,
    "/v1/responses": _responses_spots,
    "/v1/responses/compact": _responses_spots,
}
"""By path, the texts that a normaliser may see, in any order."""
