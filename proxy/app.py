"""The two listeners, built on one runtime and served by one process."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
import uvicorn

from lifecycle.ports import CacheControl
from lifecycle.store.opening import open_log
from proxy.admin_api import AdminGuard, create_admin_app
from proxy.backends_api import add_backend_routes
from proxy.collector import spare_collector
from proxy.config import Config, InvalidConfig, Listener
from proxy.config_reload import ConfigReload, Reloadable
from proxy.config_source import ConfigSource
from proxy.data_app import DataApp
from proxy.drain import Closing, Drain, DrainingServer
from proxy.following import LogOpener
from proxy.hooks_api import HooksApi
from proxy.http_server import HandoverProtocol
from proxy.normalise import Normalising
from proxy.observed_upstream import ObservedUpstream
from proxy.ops_api import OpsApi
from proxy.request_log import RequestLog
from proxy.runtime import Runtime, open_runtime
from proxy.status_api import add_status_routes
from proxy.tasks import owned_tasks
from proxy.tracing import Tracing, open_tracing

log = structlog.get_logger(__name__)

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients and balancers keep idle connections, so that they close first."""


class Serving:
    """What is up: the runtime and where to reach it."""

    def __init__(
        self,
        runtime: Runtime,
        reload: ConfigReload,
        servers: Sequence[uvicorn.Server],
        data_url: str,
        admin_url: str,
    ) -> None:
        self.runtime = runtime
        self.reload = reload
        self._servers = servers
        self.data_url = data_url
        self.admin_url = admin_url

    async def drain(self, *, at_once: bool) -> None:
        """Not ready, and no owner any more; comes back when the listeners may end, `at_once` if nobody has
        to look elsewhere first."""
        settling = self.runtime.drain.settle(at_once=at_once)
        await asyncio.gather(settling, self.runtime.office.resign())

    def hurry(self) -> None:
        """Cut off what is under way."""
        self.runtime.drain.hurry(self._servers)


def create_data_app(runtime: Runtime, tracing: Tracing | None = None) -> RequestLog:
    """The data listener's application."""
    config = runtime.config
    metrics = runtime.metrics.requests
    app = DataApp(
        runtime.backends,
        runtime.placing,
        lambda upstream: ObservedUpstream(upstream, metrics, tracing),
        runtime.auth,
        runtime.tracking,
        runtime.modes,
        runtime.hasher,
        runtime.metrics,
        OpsApi(runtime.declarations, runtime.auth, runtime.limits),
        HooksApi(runtime.hooks, runtime.auth),
        runtime.limits,
        Normalising(config, runtime.tracking.served, runtime.modes.of, runtime.metrics.normalised),
        runtime.salted,
        config.upstream.max_body_bytes,
    )
    return RequestLog(app, metrics, runtime.ids, tracing)


@asynccontextmanager
async def serving(
    config: Config,
    cache: CacheControl | None = None,
    opener: LogOpener = open_log,
    source: ConfigSource | None = None,
) -> AsyncIterator[Serving]:
    """Serve both listeners until the block ends; then drain, settle and close.

    `cache` stands in for the driver that the configuration names, `opener` for what opens its log;
    `source` is where changes of the configuration come from. Raises `InvalidConfig`, also for an address that
    everybody could use without a key, or that is taken.
    """
    async with AsyncExitStack() as stack:
        sockets = [stack.enter_context(_bound(each)) for each in (config.data, config.admin)]
        runtime = await stack.enter_async_context(open_runtime(config, cache, opener))
        tracing = open_tracing(config.tracing)
        if tracing is not None:
            stack.push_async_callback(tracing.close)
        reload = _reloading(config, source or ConfigSource(lambda: config), runtime)
        admin = create_admin_app(runtime)
        add_status_routes(admin, runtime, reload)
        add_backend_routes(admin, runtime)
        apps = (create_data_app(runtime, tracing), AdminGuard(admin, runtime))
        servers = [_server(Closing(app, runtime.drain), runtime.drain, config) for app in apps]
        tasks = await stack.enter_async_context(owned_tasks())
        running = [tasks.run(server.serve([bound])) for server, bound in zip(servers, sockets, strict=True)]
        try:
            tasks.keep(reload.run)
            # The sockets listen already: who connects before a server accepts is served a moment later.
            yield Serving(runtime, reload, servers, *(_url(bound) for bound in sockets))
        finally:
            # Health and metrics are told to the end: the admin listener ends last.
            for number, server in enumerate(servers):
                if number:
                    runtime.stopping.set()
                server.should_exit = True
                await asyncio.wait(running[number : number + 1])


def _reloading(config: Config, source: ConfigSource, runtime: Runtime) -> ConfigReload:
    parts = Reloadable(runtime.modes, runtime.limits, runtime.salted, runtime.reporting, runtime.keys)
    reload = ConfigReload(config, source, parts, runtime.metrics.registry)
    runtime.told_beside.append(lambda: reload.warnings)
    return reload


def reload_on_hangup(up: Serving) -> None:
    """SIGHUP reads the configuration anew."""
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGHUP, lambda: up.runtime.tasks.spawn(up.reload.reload())
    )


async def serve_until_signalled(config: Config, source: ConfigSource | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then drain: for a terminal at once, for balancers after a while. SIGHUP
    reads `source` anew.

    A second signal cuts off what is still under way.
    """
    told: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.put_nowait, number)
    async with serving(config, source=source) as up:
        spare_collector()
        reload_on_hangup(up)
        log.info(
            "serving",
            data=up.data_url,
            admin=up.admin_url,
            upstream=" ".join(each.url for each in config.backends),
            mode=config.mode,
        )
        first = await told.get()
        log.info("draining")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, up.hurry)
        await up.drain(at_once=first == signal.SIGINT)


@contextlib.contextmanager
def _bound(listener: Listener) -> Iterator[socket.socket]:
    """A listening socket. The protocol is named: asyncio sends small writes at once only on sockets that say
    they are TCP, and an answer's head and body are two writes (40 ms apart otherwise)."""
    family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((listener.host, listener.port))
        except OSError as error:
            raise InvalidConfig(
                f"{listener.host}:{listener.port} cannot be bound: {error.strerror or error}"
            ) from error
        bound.listen(BACKLOG)
        yield bound


def _server(app: object, drain: Drain, config: Config) -> DrainingServer:
    return DrainingServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            loop="none",
            http=HandoverProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # they pass as they came
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=config.drain.finish_seconds,  # type: ignore[arg-type]
        ),
        drain,
    )


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
