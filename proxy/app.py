"""The two listeners, built on one runtime and served by one process."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import uvicorn

from proxy.admin_api import AdminGuard, create_admin_app
from proxy.config import Config, InvalidConfig, Listener
from proxy.data_app import DataApp
from proxy.ops_api import OpsApi
from proxy.runtime import Runtime, open_runtime

log = structlog.get_logger(__name__)

LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
DRAIN_SECONDS = 30
KEEP_ALIVE_SECONDS = 75
"""Longer than clients and balancers keep idle connections, so that they close first."""


class Serving:
    """What is up: the runtime and where to reach it."""

    def __init__(self, runtime: Runtime, data_url: str, admin_url: str) -> None:
        self.runtime = runtime
        self.data_url = data_url
        self.admin_url = admin_url


def create_data_app(runtime: Runtime) -> DataApp:
    """The data listener's application."""
    config = runtime.config
    return DataApp(
        runtime.upstream,
        runtime.auth,
        runtime.tracking,
        runtime.modes,
        runtime.hasher,
        runtime.metrics,
        OpsApi(runtime.declarations, runtime.auth),
        frozenset(t.name for t in config.tenants if t.isolation == "salt"),
        config.upstream.max_body_bytes,
    )


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Serving]:
    """Serve both listeners until the block ends; then drain, settle and close.

    Raises `InvalidConfig` for an address that everybody could use without a key.
    """
    if not config.api_keys:
        for listener in (config.data, config.admin):
            if listener.host not in LOOPBACK:
                raise InvalidConfig(
                    f"{listener.host}: without api_keys only loopback addresses are served; "
                    "configure api_keys, or bind 127.0.0.1"
                )
    async with open_runtime(config) as runtime:
        data = _server(create_data_app(runtime), config.data)
        admin = _server(AdminGuard(create_admin_app(runtime), runtime), config.admin)
        async with asyncio.TaskGroup() as servers:
            for server in (data, admin):
                servers.create_task(server.serve())
            try:
                for server in (data, admin):
                    while not server.started:
                        if server.should_exit:
                            raise InvalidConfig("an address cannot be bound; see the log above")
                        await asyncio.sleep(0.01)
                yield Serving(runtime, _url(data), _url(admin))
            finally:
                data.should_exit = admin.should_exit = True


async def serve_until_signalled(config: Config) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serving(config) as up:
        log.info(
            "serving", data=up.data_url, admin=up.admin_url, upstream=config.upstream.url, mode=config.mode
        )
        await stop.wait()
        log.info("draining")


class _Server(uvicorn.Server):
    """Signals belong to the whole process, not to one listener."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _server(app: object, listener: Listener) -> _Server:
    return _Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            host=listener.host,
            port=listener.port,
            loop="none",
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
    )


def _url(server: _Server) -> str:
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
