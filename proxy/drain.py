"""The end of a proxy that costs nobody a call.

First it says that it is not ready, and goes on serving: balancers look elsewhere meanwhile, and each answer
closes its connection, so that clients come back to somebody else. Then it listens no longer; who connected
just before, or sends on a connection that was kept, is served. Streams finish, as far as that takes no longer
than they are given; what has not begun to be answered by then is refused as `Draining`, which clients retry.
"""

import asyncio
from collections.abc import Iterable, MutableMapping
from typing import Any

import structlog
import uvicorn

from proxy.config import DrainConfig
from proxy.errors import Draining
from proxy.forward import Send
from proxy.problems import caller_error, send_response
from proxy.request_body import Receive, Scope

log = structlog.get_logger(__name__)

LINGER_SECONDS = 0.5
"""How long connections without a call stay open behind the end of listening: a request may be on its way."""

_CLOSE = (b"connection", b"close")
_HOP = b"connection"


class Drain:
    """Where the end stands. `began` says that the proxy is not ready any more."""

    def __init__(self, config: DrainConfig) -> None:
        self.began = False
        self._settle_seconds = config.settle_seconds
        self._hurry = asyncio.Event()
        self._lingers = False

    async def settle(self, *, at_once: bool) -> None:
        """Not ready from now on; comes back when balancers had their time, `at_once` if there are none."""
        self.began = True
        if at_once:
            return
        self._lingers = True
        try:
            async with asyncio.timeout(self._settle_seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass

    def hurry(self, servers: Iterable[uvicorn.Server]) -> None:
        """Whoever waits for the end waits no longer: calls under way are cut off."""
        self.began = True
        self._hurry.set()
        for server in servers:
            for task in list(server.server_state.tasks):
                task.cancel()

    async def linger(self) -> None:
        """Between the end of listening and the end of connections without a call; at once over if nobody was
        told to look elsewhere."""
        self.began = True
        if not self._lingers:
            return
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                await self._hurry.wait()
        except TimeoutError:
            pass


class Closing:
    """Pure ASGI around an application: once the end began, each answer is the last one of its connection."""

    def __init__(self, app: Any, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        started = False

        async def closing(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._drain.began:
                    kept = [h for h in message.get("headers", ()) if h[0].lower() != _HOP]
                    message = {**message, "headers": [*kept, _CLOSE]}
            await send(message)

        try:
            await self._app(scope, receive, closing)
        except asyncio.CancelledError:
            if started or not self._drain.began or scope["type"] != "http":
                raise
            refusal = Draining("this proxy ends, and the engine did not begin to answer: send it again")
            await send_response(send, caller_error(refusal, scope["path"]), close=True)


class DrainingServer(uvicorn.Server):
    """One listener. Signals belong to the whole process."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    def capture_signals(self) -> Any:
        """No signals of its own."""
        return _NoSignals()

    async def shutdown(self, sockets: Any = None) -> None:
        """Listen no longer; then let go of connections without a call, and wait for the others."""
        for server in self.servers:
            server.close()
        await self._drain.linger()
        await super().shutdown(sockets)


class _NoSignals:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exc: object) -> None:
        pass
