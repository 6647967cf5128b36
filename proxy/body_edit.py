"""Edits of a JSON body as spans of bytes: what is not edited leaves exactly as it came.

A body is parsed and written again by nobody here: key order, number formats, duplicate keys, lone
surrogates and whitespace are the client's own and reach the engine unchanged.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from lifecycle.vocabulary import CACHE_SALT, KV_TRANSFER_PARAMS, LIFECYCLE_BODY_FIELD
from proxy.json_members import Member, NotScannable, ObjectSpan, scan_array, scan_object

Splice: TypeAlias = tuple[int, int, bytes]
"""Replace `[start, end)` by these bytes."""

SESSION_ID = "session_id"
RETURN_TOKEN_IDS = "return_token_ids"
ENGINE_EXTRA_ARGS = "vllm_xargs"
"""vLLM copies this object into the same place that `kv_transfer_params` ends up in."""

SETTABLE = frozenset({CACHE_SALT, SESSION_ID, RETURN_TOKEN_IDS, ENGINE_EXTRA_ARGS})
"""The members that we set, the last one only where the client has none of its own."""

CLIENT_TRANSFER_KEYS: Mapping[str, Callable[[bytes], bool]] = {
    "cached_token_stats": lambda raw: raw in (b"true", b"false"),
}
"""The keys of `kv_transfer_params` that a client may send, each with the check of its raw value."""

_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
"""Names are letters and underscores: an escaped spelling of one contains this."""

OFF_LOOP_BYTES = 64 * 1024
"""Bodies larger than this are edited in a worker thread."""

_WHITESPACE = b" \t\r\n"
_CHOICE_ID_FIELDS = frozenset({"token_ids", "prompt_token_ids"})
_MAX_INDEX_DIGITS = 9
UTF8_BOM = b"\xef\xbb\xbf"


class RequestEdit(msgspec.Struct, frozen=True, kw_only=True):
    """What a forwarded request body shall carry.

    `fields` sets top-level members (names of `SETTABLE` only); `transfer_params` sets keys inside the
    top-level `kv_transfer_params`. Values are JSON-encodable. The removal of `kv_lifecycle` and of
    client keys that are not allow-listed always happens.
    """

    fields: Mapping[str, object] = {}
    transfer_params: Mapping[str, object] = {}


class EditedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes to forward. `lifecycle` is the raw `kv_lifecycle` value that was cut out (the last one, as a
    JSON parser takes it); `dropped` names the client's `kv_transfer_params` keys that did not pass."""

    body: bytes
    lifecycle: bytes | None = None
    dropped: tuple[str, ...] = ()


class EngineIds(msgspec.Struct, frozen=True, kw_only=True):
    """A response body (or one event's data) without the token ids we asked for, and those ids.

    `tokens` holds, per choice index, the ids this body carried for it.
    """

    body: bytes
    prompt: tuple[int, ...] | None = None
    tokens: Mapping[int, tuple[int, ...]] = {}


def edit_request(body: bytes, edit: RequestEdit | None = None) -> EditedBody:
    """Apply `edit` and the removals; a body that needs neither, or is no JSON object, is returned as it is.

    A body in UTF-16 or UTF-32, which JSON parsers of engines accept, is turned into UTF-8 if it must be
    edited: otherwise it would carry forbidden keys past this function.
    """
    edit = edit or RequestEdit()
    if not SETTABLE.issuperset(edit.fields):
        raise ValueError(f"not settable: {sorted(set(edit.fields) - SETTABLE)}")
    document = as_utf8(body)
    if document is None:
        return EditedBody(body=body)
    if not _may_need_cut(document):
        if not edit.fields and not edit.transfer_params:
            return EditedBody(body=body)
        if not any(name.encode() in document for name in edit.fields):
            return EditedBody(body=_appended(document, edit) or body)
    start = len(UTF8_BOM) if document.startswith(UTF8_BOM) else 0
    try:
        root = scan_object(document, start)
    except NotScannable:
        return EditedBody(body=body)
    plan = _RequestPlan(document, root, edit)
    if not plan.splices:
        return EditedBody(body=body)
    return EditedBody(
        body=splice(document, plan.splices), lifecycle=plan.lifecycle, dropped=tuple(plan.dropped)
    )


async def edit_request_body(body: bytes, edit: RequestEdit | None = None) -> EditedBody:
    """`edit_request`, off the event loop for large bodies."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(edit_request, body, edit)
    return edit_request(body, edit)


def cut_engine_ids(body: bytes) -> EngineIds:
    """Cut `prompt_token_ids` and each choice's `token_ids` out of a completion answer and return their
    values.

    Used only where we asked for them and the client did not. A body that is no such answer comes back as
    it is.
    """
    if b"token_ids" not in body:
        return EngineIds(body=body)
    try:
        root = scan_object(body)
        splices = _without(body, root, lambda member: member.name != "prompt_token_ids")
        prompt = _id_list(body, _last(root, "prompt_token_ids"))
        tokens: dict[int, tuple[int, ...]] = {}
        choices = _last(root, "choices")
        if choices is not None and body[choices.value_start : choices.value_start + 1] == b"[":
            for number, (start, end) in enumerate(scan_array(body, choices.value_start)):
                if body[start:end][:1] != b"{":
                    continue
                choice = scan_object(body, start)
                splices += _without(body, choice, lambda member: member.name not in _CHOICE_ID_FIELDS)
                ids = _id_list(body, _last(choice, "token_ids"))
                if ids is not None:
                    tokens[_choice_index(body, choice, number)] = ids
                if prompt is None:
                    prompt = _id_list(body, _last(choice, "prompt_token_ids"))
    except NotScannable:
        return EngineIds(body=body)
    return EngineIds(body=splice(body, splices), prompt=prompt, tokens=tokens)


def splice(document: bytes, splices: Sequence[Splice]) -> bytes:
    """Apply splices that do not overlap, in any order."""
    pieces: list[bytes] = []
    position = 0
    for start, end, replacement in sorted(splices, key=lambda item: (item[0], item[1])):
        pieces += (document[position:start], replacement)
        position = end
    pieces.append(document[position:])
    return b"".join(pieces)


def _may_need_cut(document: bytes) -> bool:
    return (
        LIFECYCLE_BODY_FIELD.encode() in document
        or KV_TRANSFER_PARAMS.encode() in document
        or _ESCAPED_LETTER.search(document) is not None
    )


def _appended(document: bytes, edit: RequestEdit) -> bytes | None:
    """The document with new members at its end, without a scan: it carries none of their names so far."""
    additions = [(name, _encode(value)) for name, value in edit.fields.items()]
    if edit.transfer_params:
        additions.append((KV_TRANSFER_PARAMS, _encode(dict(edit.transfer_params))))
    members = document.rstrip(_WHITESPACE)
    opening = document.removeprefix(UTF8_BOM).lstrip(_WHITESPACE)
    if not opening.startswith(b"{") or not members.endswith(b"}"):
        return None
    end = len(members[:-1].rstrip(_WHITESPACE))
    text = b",".join(_encode(name) + b":" + value for name, value in additions)
    separator = b"" if document[end - 1 : end] == b"{" else b","
    return document[:end] + separator + text + document[end:]


class _RequestPlan:
    """The splices of one request body."""

    def __init__(self, document: bytes, root: ObjectSpan, edit: RequestEdit) -> None:
        self.splices: list[Splice] = []
        self.dropped: list[str] = []
        self.lifecycle: bytes | None = None
        self._document = document
        gone: set[int] = set()
        additions: list[tuple[str, bytes]] = []
        for member in root.members:
            if member.name == LIFECYCLE_BODY_FIELD:
                self.lifecycle = document[member.value_start : member.end]
                gone.add(member.start)
            elif member.name == ENGINE_EXTRA_ARGS:
                self._drop_smuggled_params(member)
        self._plan_transfer_params(root, edit.transfer_params, gone, additions)
        for name, value in edit.fields.items():
            found = [member for member in root.members if member.name == name]
            gone.update(member.start for member in found[:-1])
            if found:
                self.splices.append((found[-1].value_start, found[-1].end, _encode(value)))
            else:
                additions.append((name, _encode(value)))
        self._finish(root, gone, additions)

    def _plan_transfer_params(
        self,
        root: ObjectSpan,
        wanted: Mapping[str, object],
        gone: set[int],
        additions: list[tuple[str, bytes]],
    ) -> None:
        found = [member for member in root.members if member.name == KV_TRANSFER_PARAMS]
        if wanted:
            for member in found[:-1]:
                self._note_forbidden(member)
                gone.add(member.start)
            found = found[-1:]
        for member in found:
            raw = self._document[member.value_start : member.end]
            if raw[:1] == b"{":
                if not self._edit_transfer_object(member, wanted):
                    gone.add(member.start)
            elif wanted:
                self._note_forbidden(member)
                self.splices.append((member.value_start, member.end, _encode(dict(wanted))))
            elif raw != b"null":
                self._note_forbidden(member)
                gone.add(member.start)
        if wanted and not found:
            additions.append((KV_TRANSFER_PARAMS, _encode(dict(wanted))))

    def _edit_transfer_object(self, member: Member, wanted: Mapping[str, object]) -> bool:
        """Filter and fill one `kv_transfer_params` object; False when nothing of it is left to send."""
        try:
            inner = scan_object(self._document, member.value_start)
        except NotScannable:
            self._note_forbidden(member)
            return False
        gone = set[int]()
        for entry in inner.members:
            allowed = CLIENT_TRANSFER_KEYS.get(entry.name)
            if allowed is None or not allowed(self._document[entry.value_start : entry.end]):
                self.dropped.append(entry.name)
                gone.add(entry.start)
            elif entry.name in wanted:
                gone.add(entry.start)
        if gone and len(gone) == len(inner.members) and not wanted:
            return False
        self._finish(inner, gone, [(name, _encode(value)) for name, value in wanted.items()])
        return True

    def _drop_smuggled_params(self, member: Member) -> None:
        try:
            inner = scan_object(self._document, member.value_start)
        except NotScannable:
            return
        gone = {entry.start for entry in inner.members if entry.name == KV_TRANSFER_PARAMS}
        if gone:
            self.dropped.append(f"{ENGINE_EXTRA_ARGS}.{KV_TRANSFER_PARAMS}")
            self._finish(inner, gone, [])

    def _note_forbidden(self, member: Member) -> None:
        self.dropped.append(member.name)

    def _finish(self, span: ObjectSpan, gone: set[int], additions: list[tuple[str, bytes]]) -> None:
        self.splices = [s for s in self.splices if not self._inside_gone(span, gone, s)]
        self.splices += _without(self._document, span, lambda member: member.start not in gone)
        if additions:
            survivors = len(span.members) > len(gone)
            text = b",".join(_encode(name) + b":" + value for name, value in additions)
            at = span.members[-1].end if span.members else span.end - 1
            self.splices.append((at, at, b"," + text if survivors else text))

    @staticmethod
    def _inside_gone(span: ObjectSpan, gone: set[int], candidate: Splice) -> bool:
        return any(m.start <= candidate[0] < m.end for m in span.members if m.start in gone)


def _without(document: bytes, span: ObjectSpan, keep: Callable[[Member], bool]) -> list[Splice]:
    """Splices that take members out, each with exactly one of its commas."""
    splices: list[Splice] = []
    kept_before = False
    for number, member in enumerate(span.members):
        if keep(member):
            kept_before = True
        elif kept_before:
            splices.append((document.index(b",", span.members[number - 1].end), member.end, b""))
        elif number + 1 < len(span.members):
            splices.append((member.start, span.members[number + 1].start, b""))
        else:
            splices.append((member.start, member.end, b""))
    return splices


def as_utf8(body: bytes) -> bytes | None:
    """The body in UTF-8, itself if it is; None if it cannot be read in the encoding that it begins like."""
    encoding = json.detect_encoding(body[:4])
    if encoding in ("utf-8", "utf-8-sig"):
        return body
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return None


def _last(span: ObjectSpan, name: str) -> Member | None:
    return next((member for member in reversed(span.members) if member.name == name), None)


def _id_list(document: bytes, member: Member | None) -> tuple[int, ...] | None:
    if member is None:
        return None
    try:
        return msgspec.json.decode(document[member.value_start : member.end], type=tuple[int, ...] | None)
    except msgspec.DecodeError:
        return None


def _choice_index(document: bytes, choice: ObjectSpan, position: int) -> int:
    member = _last(choice, "index")
    raw = b"" if member is None else document[member.value_start : member.end]
    return int(raw) if raw.isdigit() and len(raw) <= _MAX_INDEX_DIGITS else position


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value)
