"""Whether each of several engines takes calls, and which models it serves: asked all the time, and at once
when a call could not reach it.

Only the engine itself is judged: one that refuses connections is gone at once, one that answers its health
path with an error or not at all after some tries. What it answers to calls says nothing about it, for bad
requests of one client must not close it to the others.
"""

import asyncio

import msgspec

from proxy.backends import Backend, Backends
from proxy.errors import ConnectFailed, UpstreamError
from proxy.upstream import UpstreamRequest, UpstreamResponse

LOOK_SECONDS = 2.0
AGAIN_SECONDS = 0.5
"""Pause between two looks at an engine that is well, and at one that is not."""

PATIENCE_SECONDS = 5.0
"""How long an engine may take to say that it is well: it may be in the middle of a long step."""

TRIES = 3
"""Looks in a row that must have failed before an engine that takes connections counts as gone."""

LOOKS_PER_QUESTION = 15
"""Every so many looks it is asked again which models it serves: adapters come and go."""

HEALTH_PATH = b"/health"
MODELS_PATH = b"/v1/models"
FIRST_SERVER_ERROR = 500
MAX_ANSWER_BYTES = 4 << 20
"""Of what we read of an engine for ourselves; a list of models takes kilobytes."""


class _Entry(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    data: list[_Entry]


class BackendHealth:
    """One loop for each engine, as long as there are several."""

    def __init__(
        self, backends: Backends, look_seconds: float = LOOK_SECONDS, again_seconds: float = AGAIN_SECONDS
    ) -> None:
        self._backends = backends
        self._look_seconds = look_seconds
        self._again_seconds = again_seconds

    async def run(self) -> None:
        """Until cancelled."""
        if self._backends.several:
            async with asyncio.TaskGroup() as tasks:
                for backend in self._backends.all:
                    tasks.create_task(self._watch(backend))

    async def _watch(self, backend: Backend) -> None:
        num_failed = num_looks = 0
        while True:
            backend.suspected.clear()
            problem, gone = await self._look(backend)
            num_failed = num_failed + 1 if problem else 0
            if problem and (gone or num_failed >= TRIES):
                self._backends.take_down(backend, problem)
            elif not problem:
                if backend.down or backend.models is None or num_looks % LOOKS_PER_QUESTION == 0:
                    backend.models = await self._models(backend) or backend.models
                num_looks += 1
                self._backends.bring_back(backend)
            try:
                async with asyncio.timeout(self._again_seconds if problem else self._look_seconds):
                    await backend.suspected.wait()
            except TimeoutError:
                continue
            # Many calls may fail at once: one look serves them, and a dead engine is not asked in a circle.
            await asyncio.sleep(self._again_seconds / 2)

    async def _look(self, backend: Backend) -> tuple[str, bool]:
        """What is wrong with it, empty if nothing, and whether nobody is there at all."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                status, _ = await asked(backend, HEALTH_PATH)
        except ConnectFailed as error:
            return str(error), True
        except (UpstreamError, TimeoutError) as error:
            return str(error) or f"no answer from {HEALTH_PATH.decode()} in {PATIENCE_SECONDS:g} s", False
        if status >= FIRST_SERVER_ERROR:
            return f"{HEALTH_PATH.decode()} answers {status}", False
        return "", False

    async def _models(self, backend: Backend) -> frozenset[str]:
        """Names that it serves; empty if it does not say."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                status, body = await asked(backend, MODELS_PATH)
            listing = msgspec.json.decode(body, type=_Listing)
        except (UpstreamError, TimeoutError, msgspec.DecodeError):
            return frozenset()
        return frozenset(entry.id for entry in listing.data) if status == 200 else frozenset()


async def asked(backend: Backend, target: bytes) -> tuple[int, bytes]:
    """Status and body of a GET with the engine's own key. Raises `UpstreamError`."""
    headers = [(name.encode(), value.encode()) for name, value in backend.address.headers.items()]
    request = UpstreamRequest(method="GET", raw_target=target, headers=headers)
    return await read_whole(await backend.pool.open(request))


async def read_whole(response: UpstreamResponse) -> tuple[int, bytes]:
    """Status and body, of which what passes `MAX_ANSWER_BYTES` is not read. Raises `UpstreamError`."""
    pieces: list[bytes] = []
    size = 0
    try:
        while size <= MAX_ANSWER_BYTES and (piece := await response.read()):
            pieces.append(piece)
            size += len(piece)
    finally:
        response.close()
    return response.status, b"".join(pieces)
