"""One HTTP/1.1 connection to the engine: a request goes out as bytes, its answer comes back as it arrives.

Parsing is llhttp's (by httptools). Nothing is interpreted beyond framing: no decompression, no redirects, no
cookies, no headers of its own. Everything happens on the event loop that the connection was made on.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias, cast

import httptools

from proxy.errors import UpstreamBroken

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

OnSwitch: TypeAlias = Callable[[asyncio.Transport, bytes, bytes], None]
"""Takes the connection of a request whose wish for another protocol was granted: with the answer's head, and
what came behind it."""

HIGH_WATER_BYTES = 256 * 1024
"""Unread bytes of an answer above which we stop reading it: a slow client slows its own call only."""

MAX_HEAD_BYTES = 256 * 1024

SWITCHING_PROTOCOLS = 101
_FIRST_STATUS, _FIRST_FINAL_STATUS, _LAST_STATUS = 100, 200, 599


class EngineConnection(asyncio.Protocol):
    """A connection that carries one exchange at a time. `released` is called when it is free for the next."""

    def __init__(self, released: Callable[["EngineConnection"], None]) -> None:
        self.is_open = False
        self.idle_since = 0.0
        self._released = released
        self._transport: asyncio.Transport | None = None
        self._answer: EngineAnswer | None = None
        self._may_write: asyncio.Future[None] | None = None

    def begin(self, head: bytes, body: bytes | None, answer: "EngineAnswer") -> None:
        """Send a request whose body, if it is not streamed, is at hand. Only on an idle, open connection."""
        assert self._transport is not None
        self._answer = answer
        if body:
            self._transport.writelines([head, body])
        else:
            self._transport.write(head)

    async def stream(self, pieces: AsyncIterator[bytes], *, chunked: bool) -> None:
        """Send the body of the request that was begun; returns early when the connection is gone."""
        async for piece in pieces:
            if piece and not await self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece):
                return
        if chunked:
            await self._write(b"0\r\n\r\n")

    async def _write(self, data: bytes) -> bool:
        while self._may_write is not None:
            await self._may_write
        if self._transport is None or not self.is_open:
            return False
        self._transport.write(data)
        return True

    def finished(self, answer: "EngineAnswer", *, reusable: bool) -> None:
        """The exchange is over; without `reusable` so is the connection."""
        if answer is not self._answer:
            return
        self._answer = None
        if reusable and self.is_open:
            self._released(self)
        else:
            self.close()

    def close(self) -> None:
        """Drop the connection, whatever is under way on it."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def give_away(self) -> asyncio.Transport:
        """The transport, for whoever speaks another protocol on it. This connection is over."""
        assert self._transport is not None
        transport, self._transport, self._answer = self._transport, None, None
        self.is_open = False
        return transport

    def hold_reading(self, hold: bool) -> None:
        """Read no further from the engine, or go on."""
        if self._transport is not None and self.is_open:
            if hold:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not every loop's transports are subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            # Nobody asked: an engine's parting words on an idle connection.
            self.close()
        else:
            self._answer.feed(data)

    def pause_writing(self) -> None:
        self._may_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        waiting, self._may_write = self._may_write, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self.resume_writing()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.lost(exc)


class EngineAnswer:
    """One answer while it arrives. `head` is done when its head has come, or never will.

    With `on_switch` the engine may answer 101: there HTTP ends, and the answer with its head.
    """

    def __init__(
        self,
        connection: EngineConnection,
        *,
        is_head_request: bool,
        idle_seconds: float,
        on_switch: OnSwitch | None = None,
    ) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sending: asyncio.Task[None] | None = None
        """Sends a streamed body; an answer may come before it is done."""
        self._connection = connection
        self._is_head_request = is_head_request
        self._idle_seconds = idle_seconds
        self._on_switch = on_switch
        self._parser = httptools.HttpResponseParser(self)
        self._reason = b""
        self._raw_headers: list[tuple[bytes, bytes]] = []
        self._num_head_bytes = 0
        self._pieces: deque[bytes] = deque()
        self._num_unread = 0
        self._held = False
        self._until_close = False
        self._complete = False
        self._failure: UpstreamBroken | None = None
        self._arrival: asyncio.Future[None] | None = None

    # -- for whoever relays it ----------------------------------------------------------------------------

    async def read(self) -> bytes:
        """The next bytes as they arrived, empty at the end. Raises `UpstreamBroken`."""
        while not self._pieces:
            if self._complete:
                return b""
            if self._failure is not None:
                raise self._failure
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._idle_seconds):
                    await self._arrival
            except TimeoutError as error:
                raise UpstreamBroken(f"the engine was silent for {self._idle_seconds:g} s") from error
            finally:
                self._arrival = None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_unread = 0
        if self._held:
            self._held = False
            self._connection.hold_reading(False)
        return data

    def at_end(self) -> bool:
        """Whether the body is known to be over."""
        return self._complete and not self._pieces

    def close(self) -> None:
        """Let go. An answer that has not come to its end is given up by closing the connection, which stops
        the engine."""
        if self.sending is not None:
            self.sending.cancel()
        self._connection.finished(self, reusable=False)

    # -- for the connection -------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Bytes came."""
        if not self.head.done():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and b"\r\n\r\n" not in data:
                self._fail("the head of the engine's answer is too long", None)
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._failure is None and not self.head.done():
                self._switch(data[upgrade.args[0] :])
            else:
                self._connection.close()
        except httptools.HttpParserError as error:
            if not self._complete and self._failure is None:
                self._fail("the engine's answer is not HTTP", error)
            self._connection.close()

    def lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self._complete:
            return
        if self._until_close and error is None:
            self._end()
        else:
            before = "answered" if not self.head.done() else "had answered to the end"
            self._fail(f"the engine broke the connection before it {before}", error)

    def _switch(self, behind: bytes) -> None:
        assert self._on_switch is not None
        lines = [b"HTTP/1.1 %d %b" % (self.status, self._reason)]
        lines += [b"%b: %b" % header for header in self.headers]
        self._end()
        self._on_switch(self._connection.give_away(), b"\r\n".join(lines) + b"\r\n\r\n", behind)
        self.head.set_result(None)

    def _fail(self, what: str, cause: Exception | None) -> None:
        self._failure = UpstreamBroken(what)
        self._failure.__cause__ = cause
        if not self.head.done():
            self.head.set_exception(self._failure)
            # Whoever waits for it may have been cancelled.
            self.head.exception()
        self._wake()
        self._connection.finished(self, reusable=False)

    def _end(self) -> None:
        self._complete = True
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    # -- llhttp's callbacks -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._connection.close()

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes behind the body are trailers: hop by hop, dropped.
        if not self.head.done():
            self._raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        if self._complete or self.head.done():
            return
        if status == SWITCHING_PROTOCOLS:
            if self._on_switch is None or not self._parser.should_upgrade():
                self._fail("the engine switched to another protocol unasked", None)
                return
            self.status, self.headers = status, self._raw_headers
            return
        if _FIRST_STATUS <= status < _FIRST_FINAL_STATUS:
            self._raw_headers.clear()
            self._reason = b""
            return
        names = {name.lower() for name, _ in self._raw_headers}
        codings = [v.strip().lower() for name, v in self._raw_headers if name.lower() == b"transfer-encoding"]
        if not _FIRST_STATUS <= status <= _LAST_STATUS or codings not in ([], [b"chunked"]):
            # Neither can be passed on: there is no such status, and a coding concerns this connection only.
            self._fail("the engine's answer has a status or a transfer coding that HTTP does not know", None)
            return
        self.status = status
        self.headers = self._raw_headers
        framed = b"content-length" in names or b"transfer-encoding" in names
        self._until_close = not framed and not self._is_head_request
        self.head.set_result(None)
        if self._is_head_request:
            self._finish()

    def on_body(self, data: bytes) -> None:
        if self._complete or self._failure is not None:
            # An answer to HEAD has no body; who sends one cannot be understood any further.
            self._connection.close()
            return
        self._pieces.append(data)
        self._num_unread += len(data)
        if self._num_unread > HIGH_WATER_BYTES and not self._held:
            self._held = True
            self._connection.hold_reading(True)
        self._wake()

    def on_message_complete(self) -> None:
        if self.head.done() and not self._complete:
            self._finish()

    def _finish(self) -> None:
        self._end()
        sent = self.sending is None or self.sending.done()
        if self._held:
            self._held = False
            self._connection.hold_reading(False)
        self._connection.finished(self, reusable=sent and bool(self._parser.should_keep_alive()))
