"""WebSockets: bytes between a client and the engine, both ways, once the engine has switched protocols.

No frame is read. What one side sends goes to the other as fast as that one takes it; an end, half an end or a
reset of one side becomes the same of the other at once.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

HANDOVER = "kvtether.handover"
"""The extension of an ASGI scope that holds a `Handover`."""

USED_SECONDS = 600.0

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Handover(Protocol):
    """A client's connection that the server gives away."""

    def take_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]:
        """From now on `protocol` hears what comes. Also gives what had come already."""
        ...

    def connection_lost(self, exc: Exception | None) -> None:
        """To be called when the connection that was taken is gone."""
        ...


class Tunnel:
    """One tunnel. `used` is called when it opens and ends, and every ten minutes with traffic between."""

    def __init__(self, handover: Handover, used: Callable[[], None]) -> None:
        self.begun = False
        self._used = used
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = _End(self._end_lost)
        self._engine = _End(self._end_lost)
        self._client.other, self._engine.other = self._engine, self._client
        self._handover = handover

    def begin(self, engine: asyncio.Transport, head: bytes, behind: bytes) -> None:
        """The engine switched: `head` is its answer as the client shall see it, `behind` what followed."""
        self.begun = True
        client, early = self._handover.take_over(self._client)
        self._client.transport, self._engine.transport = client, engine
        engine.set_protocol(self._engine)
        if client.is_closing():
            self._client.lost = True  # that may have been told before anybody heard it here
            engine.abort()
            return
        client.write(head + behind)
        if early:
            engine.write(early)

    async def run(self) -> None:
        """Until both sides are gone; cancelled, it cuts them off."""
        try:
            while not self._over.done():
                if not self._client.quiet or not self._engine.quiet:
                    self._client.quiet = self._engine.quiet = True
                    self._used()
                await asyncio.wait((self._over,), timeout=USED_SECONDS)
            self._used()
        finally:
            self.abort()

    def abort(self) -> None:
        """Cut off what is open."""
        for end in (self._client, self._engine):
            if end.transport is not None:
                end.transport.abort()

    def _end_lost(self, end: "_End", error: Exception | None) -> None:
        if end is self._client:
            self._handover.connection_lost(error)
        if end.other.lost and not self._over.done():
            self._over.set_result(None)


class _End(asyncio.Protocol):
    """What one side sends goes out at the `other`."""

    other: "_End"

    def __init__(self, on_lost: Callable[["_End", Exception | None], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.quiet = False
        self.said_all = False
        self.lost = False
        self._on_lost = on_lost

    @property
    def writable(self) -> asyncio.Transport | None:
        """Where to write to this side, as long as somebody is there."""
        transport = self.transport
        return None if transport is None or self.lost or transport.is_closing() else transport

    def data_received(self, data: bytes) -> None:
        self.quiet = False
        if (out := self.other.writable) is not None:
            out.write(data)

    def pause_writing(self) -> None:
        if not self.other.said_all and (source := self.other.writable) is not None:
            source.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.said_all and (source := self.other.writable) is not None:
            source.resume_reading()

    def eof_received(self) -> bool:
        """This side sends no more, but may listen. With TLS on either side there is no half an end."""
        self.said_all = True
        own, out = self.writable, self.other.writable
        one_way = own is not None and out is not None and own.can_write_eof() and out.can_write_eof()
        if out is not None and one_way and not self.other.said_all:
            with suppress(OSError):  # a peer that is gone: its own end tells
                out.write_eof()
            return True
        if out is not None:
            out.close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if (out := self.other.writable) is not None:
            if exc is None:
                out.close()
            else:
                _reset(out)
        self._on_lost(self, exc)


def _reset(transport: asyncio.Transport) -> None:
    """Close with a TCP reset: nobody may take what was broken for something that ended."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
