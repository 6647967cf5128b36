"""The engines behind us: which of them may take a call, and the way there.

One engine is the usual case and costs nothing here. With several every call gets a `Route`: it goes to the
engine that was chosen, and to the next one only where that is full, or no connection could be made, for then
nothing was sent.
"""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import structlog

from engine_bridge.engine_address import EngineAddress
from proxy.affinity import Kinship, Placed, least_loaded, place, ranked
from proxy.config import BackendConfig, Config, InvalidConfig
from proxy.engine_connection import Headers
from proxy.errors import ConnectFailed, EngineFull
from proxy.request_record import current_request, the_request
from proxy.upstream import (
    PooledUpstream,
    UpstreamRequest,
    UpstreamResponse,
    UpstreamTarget,
    UpstreamTimeouts,
)

log = structlog.get_logger(__name__)

_QUESTIONS = frozenset({"GET", "HEAD", "OPTIONS"})
"""What is asked of an engine that has all the calls it may have, too: how it is, and what it serves."""

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


class Backend:
    """One engine. `models` are those it serves, None until it was asked; `load` the calls under way on it, of
    which it takes no more than `max_connections` at a time.

    `down` says why it takes no calls, empty while it does. `suspected` is set to have it looked at now.
    Counted are the requests that it took, those that found no connection to it, and the times it was gone.
    """

    def __init__(self, config: BackendConfig, timeouts: UpstreamTimeouts, max_connections: int) -> None:
        self.name = config.name
        self.config = config
        try:
            target = UpstreamTarget.parse(config.url)
        except ValueError as error:
            where = f"upstreams, {config.name}" if config.name else "upstream.url"
            raise InvalidConfig(f"{where}: {error}") from error
        self.pool = PooledUpstream(target, timeouts)
        self.key = os.environ.get(config.api_key_env, "")
        self.models: frozenset[str] | None = None
        self.load = 0
        self._max_connections = max_connections
        self._free = asyncio.Semaphore(max_connections)
        self._patience_seconds = timeouts.connect
        self.down = ""
        self.draining = False
        self.num_taken = self.num_unreached = self.num_lost = 0
        self.suspected = asyncio.Event()

    @property
    def address(self) -> EngineAddress:
        """Where whoever asks it beside the calls finds it."""
        return EngineAddress(self.config.url, self.name, self.key)

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See `Upstream`. With a key of the engine's own, that stands in for whatever was sent.

        Raises `EngineFull` besides.
        """
        if self.key:
            request = UpstreamRequest(
                method=request.method,
                raw_target=request.raw_target,
                headers=self._with_key(request.headers),
                body=request.body,
                on_switch=request.on_switch,
            )
        counts = request.method not in _QUESTIONS or request.on_switch is not None
        if counts:
            await self._turn()
        self.load += 1
        try:
            return _Underway(await self.pool.open(request), self, counts)
        except BaseException:
            self.done(counts)
            raise

    @property
    def is_full(self) -> bool:
        """Whether a call would have to wait for another one's end."""
        return self._free.locked()

    async def _turn(self) -> None:
        if not self.is_full:
            await self._free.acquire()
            return
        try:
            async with asyncio.timeout(self._patience_seconds):
                await self._free.acquire()
        except TimeoutError as error:
            raise EngineFull(f"the engine has {self._max_connections} calls under way") from error
        if (record := current_request()) is not None:
            record.sent = time.perf_counter()  # that was our wait, not the engine's

    def done(self, counted: bool) -> None:
        """A request that it had under way is over."""
        self.load -= 1
        if counted:
            self._free.release()

    def _with_key(self, headers: Headers) -> Headers:
        kept = [(name, value) for name, value in headers if name.lower() not in _CREDENTIALS]
        return [*kept, (b"authorization", b"Bearer " + self.key.encode())]


class _Underway:
    """An answer that counts as load until it is closed."""

    def __init__(self, response: UpstreamResponse, backend: Backend, counted: bool) -> None:
        self.status = response.status
        self.headers = response.headers
        self.read = response.read
        self.at_end = response.at_end
        self._response = response
        self._backend: Backend | None = backend
        self._counted = counted

    def close(self) -> None:
        """Close it; once."""
        self._response.close()
        if self._backend is not None:
            self._backend.done(self._counted)
            self._backend = None


class Route:
    """An `Upstream` for one request: engines in the order in which they are tried.

    `taken_by` is the name of the one that took the request, and `reached` is told it; `failed` hears of those
    that could not be reached. With `noted` the request's record says which one was tried last.
    """

    def __init__(
        self,
        order: Iterable[Backend],
        failed: Callable[[Backend, str], None],
        reached: Callable[[str], None] = lambda name: None,
        noted: bool = True,
    ) -> None:
        self.taken_by = ""
        self._order = list(order)
        self._failed = failed
        self._reached = reached
        self._noted = noted

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See `Upstream`. Only where no connection could be made is the next engine tried.

        One that is full is passed over; where all are, the first is waited for.
        """
        order = [backend for backend in self._order if not backend.is_full] or self._order[:1]
        for number, backend in enumerate(order, start=1):
            if self._noted:
                the_request().backend = backend.name
            try:
                response = await backend.open(request)
            except ConnectFailed as error:
                backend.num_unreached += 1
                self._failed(backend, str(error))
                if number == len(order):
                    raise
            else:
                backend.num_taken += 1
                self.taken_by = backend.name
                self._reached(backend.name)
                return response
        raise ConnectFailed("there is no engine to connect to")

    async def close(self) -> None:
        """The engines belong to everybody."""


class Backends:
    """All engines that the configuration names. Must be built and closed on the loop that uses it.

    Raises `InvalidConfig` for an address that is none.
    """

    def __init__(self, config: Config) -> None:
        timeouts = UpstreamTimeouts(
            config.upstream.connect_seconds, config.upstream.first_byte_seconds, config.upstream.idle_seconds
        )
        most = config.upstream.max_connections
        self.all = [Backend(each, timeouts, most) for each in config.backends]
        self.several = len(self.all) > 1
        self.lost: list[Callable[[Backend, str], None]] = []
        """Told when an engine takes no calls any more, and why."""
        self.found: list[Callable[[Backend], None]] = []
        """Told when one takes calls again."""
        self._count = 0

    @property
    def names(self) -> Collection[str]:
        return [backend.name for backend in self.all]

    def find(self, name: str) -> Backend | None:
        """The engine of that name."""
        return next((backend for backend in self.all if backend.name == name), None) if name else None

    def usable(self, model: str = "") -> list[Backend]:
        """Those that may take a new call, never none: where nobody is well, those that are not are tried.

        A model that no engine is known to serve is for the engines to refuse.
        """
        chosen = self.all
        chosen = [b for b in chosen if b.models is None or model in b.models] or chosen
        chosen = [b for b in chosen if not b.down] or chosen
        return [b for b in chosen if not b.draining] or chosen

    def place(self, kin: Kinship, model: str) -> Placed:
        """Where a context's call goes."""
        if not self.several:
            return Placed(self.all[0].name)
        return place(kin, _loads(self.usable(model)), self.names)

    def route(
        self, placed: Placed, root: str, model: str, reached: Callable[[str], None] = lambda name: None
    ) -> Route:
        """The way to where a call was placed, and from there on to those that may take it as well."""
        if not self.several:
            return Route(self.all, self.failed, noted=False)
        usable = {backend.name: backend for backend in self.usable(model)}
        order = sorted(ranked(root, usable), key=lambda name: name != placed.backend)
        return Route([usable[name] for name in order], self.failed, reached)

    def anywhere(self, model: str = "") -> Route:
        """The way for what shares nothing with any context: to the engine with the least to do."""
        if not self.several:
            return Route(self.all, self.failed, noted=False)
        self._count += 1
        root = str(self._count)
        name = least_loaded(root, _loads(self.usable(model)))
        return self.route(Placed(name), root, model)

    def to(self, backend: Backend) -> Route:
        """The way to one engine and to no other."""
        return Route([backend], self.failed)

    def failed(self, backend: Backend, reason: str) -> None:
        """An engine took no connection: that is no word about a call, but about the engine."""
        if self.several:
            self.take_down(backend, reason)
            backend.suspected.set()

    def take_down(self, backend: Backend, reason: str) -> None:
        """No calls for this engine until it was found well."""
        known, backend.down = backend.down, reason
        if not known:
            backend.num_lost += 1
            log.error("an engine is gone", backend=backend.name, reason=reason)
            for told in self.lost:
                told(backend, reason)

    def bring_back(self, backend: Backend) -> None:
        """It was found well."""
        if backend.down:
            backend.down = ""
            log.warning("an engine is back", backend=backend.name)
            for told in self.found:
                told(backend)

    async def close(self) -> None:
        """Close every connection."""
        for backend in self.all:
            await backend.pool.close()


def _loads(backends: Iterable[Backend]) -> Mapping[str, int]:
    return {backend.name: backend.load for backend in backends}
