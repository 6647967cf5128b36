"""Server-sent events out of a byte stream, and the one rewrite we may do on them.

Follows the event-stream grammar of the HTML standard: three kinds of line end, comments, several `data`
lines an event, a byte order mark at the start. One leniency: an event that the stream's end cut off
before its blank line is delivered as well, for some engines leave out the last line end.
"""

import re
from collections.abc import Callable

import msgspec

_BOM = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_DATA_LINE = re.compile(rb"(?<![^\r\n])data:( ?)([^\r\n]*)")


class ServerEvent(msgspec.Struct, frozen=True):
    """One event: its `event:` name, empty if it had none, and its `data` lines joined by line feeds."""

    name: str
    data: bytes


class EventSplitter:
    """Cuts a stream that arrives in arbitrary pieces into events. Cost is linear in the bytes fed."""

    def __init__(self) -> None:
        self._partial_line: list[bytes] = []
        self._data: list[bytes] = []
        self._name = ""
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """Events that this chunk completes."""
        events: list[ServerEvent] = []
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
            self._after_cr = False
        for piece in chunk.splitlines(keepends=True):
            self._after_cr = False
            content = piece.rstrip(b"\r\n")
            if len(content) == len(piece):
                self._partial_line.append(piece)
                continue
            self._after_cr = piece.endswith(b"\r")
            if self._partial_line:
                content = b"".join((*self._partial_line, content))
                self._partial_line.clear()
            self._take_line(content, events)
        return events

    def close(self) -> list[ServerEvent]:
        """The event that was still open when the stream ended, if there is one."""
        events: list[ServerEvent] = []
        if self._partial_line:
            self._take_line(b"".join(self._partial_line), events)
            self._partial_line.clear()
        self._take_line(b"", events)
        return events

    def _take_line(self, line: bytes, events: list[ServerEvent]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append(ServerEvent(self._name, b"\n".join(self._data)))
            self._data = []
            self._name = ""
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")


class EventRewriter:
    """Holds the stream back to whole events and passes the data of each one-line event through `rewrite`.

    Everything that `rewrite` returns unchanged, and every other line, leaves byte for byte as it came.
    """

    def __init__(self, rewrite: Callable[[bytes], bytes]) -> None:
        self._rewrite = rewrite
        self._held = bytearray()
        self._searched = 0

    def feed(self, chunk: bytes) -> bytes:
        """The events completed so far, rewritten."""
        self._held += chunk
        end = 0
        # Three bytes back: a blank line may straddle two chunks. A carriage return at the very end is
        # held until the next byte tells whether a line feed belongs to it.
        limit = len(self._held) - 1 if self._held.endswith(b"\r") else len(self._held)
        for match in _BLANK_LINE.finditer(self._held, max(0, self._searched - 3), limit):
            end = match.end()
        ready = bytes(self._held[:end])
        del self._held[:end]
        self._searched = len(self._held)
        return self._rewrite_events(ready)

    def close(self) -> bytes:
        """What was held back when the stream ended."""
        rest = bytes(self._held)
        self._held.clear()
        return self._rewrite_events(rest)

    def _rewrite_events(self, events: bytes) -> bytes:
        return _DATA_LINE.sub(lambda m: b"data:" + m[1] + self._rewrite(m[2]), events)
