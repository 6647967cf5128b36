"""uvicorn's HTTP/1.1 protocol, with requests for an upgrade treated as a proxy must.

uvicorn either ends a WebSocket itself, or drops everything behind a request that asks for an upgrade, its
body included. Here a WebSocket handshake goes to the application as an ordinary request that carries a
`Handover`, by which the application may take the whole connection. Any other upgrade is ignored and the
request answered, as HTTP allows (Java's client sends `Upgrade: h2c` with its first POST) and as a proxy must:
what follows an upgrade that it does not understand would pass its checks unread.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.joined_writes import JoinedWrites
from proxy.request_body import has_body
from proxy.tunnel import HANDOVER

_INVALID = "Invalid HTTP request received."


class HandoverProtocol(HttpToolsProtocol):
    """One connection of a client. It is the `Handover` of the WebSocket handshake that came on it, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deciding = True
        self._behind: bytearray | None = None
        """What came behind a WebSocket handshake: not HTTP any more, whoever gets it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self.transport = JoinedWrites(transport)  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Bytes came. They are parsed as HTTP up to a WebSocket handshake."""
        self._unset_keepalive_if_required()
        if self._behind is not None:
            self._hold(data)
            return
        try:
            self._read(memoryview(data))
        except httptools.HttpParserError:
            self.logger.warning(_INVALID)
            self.send_400_response(_INVALID)

    def take_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]:
        """Give the connection to `protocol`, with what came behind the handshake.

        For uvicorn the client has hung up: it sends no more. At the end `connection_lost` must be called.
        """
        behind = bytes(self._behind or b"")
        transport: asyncio.Transport = self.transport.inner  # type: ignore[attr-defined]
        transport.set_protocol(protocol)
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.flow.resume_reading()
        return transport, behind

    def _read(self, data: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            else:
                return
            if self._is_websocket_handshake():
                self._offer(data)
                return
            self._parse_without_upgrade()

    def _is_websocket_handshake(self) -> bool:
        upgrades = [value.strip().lower() for name, value in self.headers if name == b"upgrade"]
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and upgrades == [b"websocket"]
            and not has_body({"headers": self.headers})
        )

    def _offer(self, behind: memoryview) -> None:
        """Start the application. Unless it takes over, the connection ends with its answer."""
        self._behind = bytearray()
        self._deciding = False
        self.scope["extensions"] = {HANDOVER: self}  # type: ignore[dict-item]
        self.on_headers_complete()
        self.cycle.keep_alive = False
        self.on_message_complete()
        self._hold(behind)

    def _hold(self, data: bytes | memoryview) -> None:
        assert self._behind is not None
        self._behind += data
        if len(self._behind) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _parse_without_upgrade(self) -> None:
        """The same request once more, as if it had not asked; its body is still to come."""
        method: bytes = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("nobody is connected through here")
        head = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n")

    def _should_upgrade(self) -> bool:
        """uvicorn's question whether to leave a request that asks for an upgrade alone: until we decided."""
        return self._deciding
