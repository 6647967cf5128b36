"""Reads traces: gzipped or plain lines of JSON, a header and then one call a line, message lists as deltas.

A call's list is the first `keep` messages of the list that call `base` ended with, its answer included, and
then the `new` ones. What a line says twice is compared: token totals with the sum over the list, lifecycle
events with what the lists show. Only the session being read is held in memory.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from engine_bridge.errors import MalformedTrace
from engine_bridge.sim.traces.calls import (
    Call,
    Change,
    ChangeKind,
    Message,
    Role,
    changes_between,
    shared_prefix,
)

FORMAT = 1
"""The version that this module reads: `fmt` of the header."""


class Header(msgspec.Struct, frozen=True):
    """Where a trace comes from. `starts`: when each session began, seconds from the first; or empty."""

    src: str
    commit: str
    license: str
    timing: str
    fmt: int = FORMAT
    w: str = ""
    tokenizer: str = ""
    note: str = ""
    starts: tuple[float, ...] = ()


class _HeaderLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    header: Header


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line as it stands in the file."""

    s: int
    i: int
    c: int
    pc: int
    t: float
    dur: float
    base: int
    keep: int
    new: tuple[tuple[str, Role, int], ...]
    num_tokens: int = msgspec.field(name="in")
    pre: tuple[tuple[str | int, ...], ...]
    de: Literal[0, 1] = 0
    gap: float | None = None
    gk: str = ""
    wait: str = ""
    tool: tuple[str, ...] = ()
    out: tuple[str, int] | None = None
    ot: int = -1
    post: tuple[tuple[Literal["close"]], ...] = ()
    ck: Literal[0, 1] = 0
    m: str = ""


class Decoder:
    """Turns the records of a trace into calls, in order. A refused record raises `ValueError`."""

    def __init__(self) -> None:
        self._session = -1
        self._begin()

    def _begin(self) -> None:
        self._ended_with: list[tuple[Message, ...]] = []
        self._last_of: dict[int, int] = {}
        self._closed: set[int] = set()
        self._answers: dict[str, int] = {}
        self._at = 0.0

    def call(self, record: Record) -> Call:
        if record.s != self._session:
            if record.s < self._session:
                raise ValueError(f"session {record.s} behind session {self._session}")
            self._session = record.s
            self._begin()
        if record.i != len(self._ended_with):
            raise ValueError(f"call {record.i} where call {len(self._ended_with)} of the session is due")
        if record.t < self._at:
            raise ValueError(f"arrives at {record.t}, before the call before it")
        if record.c in self._closed:
            raise ValueError(f"context {record.c} was closed")
        messages = self._messages(record)
        answer = None
        if record.out is not None:
            answer = Message(record.out[0], Role.ASSISTANT, record.out[1], record.i)
        call = Call(
            session=record.s,
            index=record.i,
            context=record.c,
            parent=record.pc,
            at_seconds=record.t,
            service_seconds=record.dur,
            service_estimated=bool(record.de),
            gap_seconds=record.gap,
            gap_kind=record.gk,
            waits_for=record.wait,
            tools=record.tool,
            messages=messages,
            answer=answer,
            num_generated=record.ot if record.ot >= 0 else (answer.num_tokens if answer else 0),
            before=self._changes(record, messages),
            closes=bool(record.post),
            close_known=bool(record.ck),
            model=record.m,
        )
        if call.num_tokens != record.num_tokens:
            raise ValueError(f"`in` is {record.num_tokens}, the list has {call.num_tokens} tokens")
        self._note(call)
        return call

    def _messages(self, record: Record) -> tuple[Message, ...]:
        if any(num_tokens < 0 for _, _, num_tokens in record.new) or (record.out and record.out[1] < 0):
            raise ValueError("a message of negative length")
        new = tuple(
            Message(each_id, role, num_tokens, self._answers.get(each_id, -1))
            for each_id, role, num_tokens in record.new
        )
        if record.base == -1:
            if record.keep:
                raise ValueError(f"keeps {record.keep} messages of no list")
            return new
        if not 0 <= record.base < len(self._ended_with):
            raise ValueError(f"`base` is call {record.base}, which is not before it")
        base = self._ended_with[record.base]
        if not 0 <= record.keep <= len(base):
            raise ValueError(f"keeps {record.keep} messages of a list of {len(base)}")
        return base[: record.keep] + new

    def _changes(self, record: Record, messages: tuple[Message, ...]) -> tuple[Change, ...]:
        last = self._last_of.get(record.c)
        if last is not None:
            shown = changes_between(self._ended_with[last], messages)
            if record.pre != tuple(_as_recorded(change) for change in shown):
                raise ValueError(f"`pre` is {list(record.pre)}, the lists show {list(shown)}")
            return shown
        if record.pc != -1 and record.pc not in self._last_of:
            raise ValueError(f"context {record.c} has a parent without calls, {record.pc}")
        one_off = record.pre[1:] == (("one_off",),)
        rest = (Change(ChangeKind.ONE_OFF),) if one_off else ()
        match record.pre[: len(record.pre) - len(rest)]:
            case (("create",),):
                return (Change(ChangeKind.CREATE), *rest)
            case (("fork", int(parent), int(kept)),) if parent == record.pc:
                theirs = self._ended_with[self._last_of[parent]]
                if shared_prefix(theirs, messages) < kept:
                    raise ValueError(f"a fork that does not begin with {kept} messages of its parent")
                return (Change(ChangeKind.FORK, 0, kept), *rest)
            case _:
                raise ValueError(f"context {record.c} begins with `pre` {list(record.pre)}")

    def _note(self, call: Call) -> None:
        self._at = call.at_seconds
        self._last_of[call.context] = call.index
        self._ended_with.append(call.list_after)
        if call.answer is not None:
            self._answers[call.answer.id] = call.index
        if call.closes:
            self._closed.add(call.context)


def _as_recorded(change: Change) -> tuple[str | int, ...]:
    if change.kind is ChangeKind.APPEND:
        return change.kind.value, change.num_messages
    return change.kind.value, change.start, change.num_messages, change.num_tokens


class TraceFile:
    """A trace on disk. Each iteration reads it anew, line by line. Raises `MalformedTrace`, `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def header(self) -> Header:
        with self._open() as lines:
            return self._header(lines)

    def __iter__(self) -> Iterator[Call]:
        decoder = Decoder()
        record_of = msgspec.json.Decoder(Record)
        with self._open() as lines:
            self._header(lines)
            number = 1
            while line := self._line(lines, number + 1):
                number += 1
                try:
                    yield decoder.call(record_of.decode(line))
                except (msgspec.DecodeError, ValueError) as error:
                    raise MalformedTrace(self.path, number, str(error)) from error

    def _open(self) -> io.BufferedIOBase:
        """Bytes whose lines are those of the trace: by its first two bytes a file is gzipped or not."""
        with self.path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        return gzip.open(self.path) if zipped else self.path.open("rb")

    def _header(self, lines: io.BufferedIOBase) -> Header:
        try:
            header = msgspec.json.decode(self._line(lines, 1), type=_HeaderLine).header
        except msgspec.DecodeError as error:
            raise MalformedTrace(self.path, 1, f"no header: {error}") from error
        if header.fmt != FORMAT:
            raise MalformedTrace(self.path, 1, f"format {header.fmt}, this reads {FORMAT}")
        return header

    def _line(self, lines: io.BufferedIOBase, number: int) -> bytes:
        try:
            return bytes(lines.readline())
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise MalformedTrace(self.path, number, f"broken archive: {error}") from error
