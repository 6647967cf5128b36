"""The whole embedded engine: tokenizer, tiers, KV events, and an OpenAI-compatible server on loopback.

It computes nothing: answers are pseudo-text or a script's words, times come from a cost model. Tokens, keys,
events, hits and errors are real.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import uvicorn

from engine_bridge.sim.clock import RealClock, SimClock
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.event_stream import EventStream
from engine_bridge.sim.generation import Speaker
from engine_bridge.sim.hardware import EngineConfig
from engine_bridge.sim.http_api import EngineApi
from engine_bridge.sim.model_files import MODEL_DIRECTORY
from engine_bridge.sim.replies import Script
from engine_bridge.sim.runner import EngineRunner
from engine_bridge.sim.tokenizer import ChatTokenizer

LOOPBACK = "127.0.0.1"
BACKLOG = 1024


class EmbeddedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an embedded engine may differ in.

    `model_path` is any local model directory with a fast tokenizer and a chat template. `engine` is machine
    and cache. `save_generated` keeps generated tokens in the cache too, as a deployment for agents should.
    `port` 0 takes a free one.
    """

    model_path: str = str(MODEL_DIRECTORY)
    model_name: str = "tiny"
    engine: EngineConfig = EngineConfig()
    save_generated: bool = True
    port: int = 0


class EmbeddedEngine:
    """Serves while its `async with` block lasts. `script` decides what the model says; None: pseudo-text."""

    def __init__(
        self,
        options: EmbeddedOptions | None = None,
        *,
        script: Script | None = None,
        clock: SimClock | None = None,
    ) -> None:
        self.options = options or EmbeddedOptions()
        self.tokenizer = ChatTokenizer(Path(self.options.model_path))
        self.speaker = Speaker(self.tokenizer, script)
        self.events = EventStream()
        self.runner = EngineRunner(
            SimEngine(self.options.engine, [self.events.take]), RealClock() if clock is None else clock
        )
        self._exit = AsyncExitStack()
        self._port = 0

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together: what engine, model and HBM allow."""
        config = self.options.engine
        room = config.num_blocks * config.block_tokens
        return min(config.max_model_len, self.tokenizer.context_tokens, room)

    @property
    def url(self) -> str:
        """The HTTP surface, without a trailing slash."""
        return f"http://{LOOPBACK}:{self._port}"

    async def __aenter__(self) -> "EmbeddedEngine":
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.events)
            bound = stack.enter_context(_bound(self.options.port))
            self._port = bound.getsockname()[1]
            server = _server(self._api())
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = tasks.create_task(self.runner.run())
            stack.callback(running.cancel)
            serving = tasks.create_task(server.serve([bound]))
            stack.push_async_callback(_stop, server, serving)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    def _api(self) -> EngineApi:
        options = self.options
        return EngineApi(
            self.runner,
            self.tokenizer,
            self.speaker,
            options.model_name,
            options.model_path,
            options.save_generated,
            self.max_model_len,
        )


class _Server(uvicorn.Server):
    """Signals belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _server(api: EngineApi) -> _Server:
    return _Server(
        uvicorn.Config(
            api.app(),
            loop="none",
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )


async def _stop(server: _Server, serving: "asyncio.Task[None]") -> None:
    server.should_exit = True
    await asyncio.wait([serving])


@contextlib.contextmanager
def _bound(port: int) -> Iterator[socket.socket]:
    """A listening socket that says it is TCP, for only then asyncio sends small writes at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
        bound.listen(BACKLOG)
        yield bound
