"""One whole proxy, in enforce, that a test run's torture is done to, in front of an engine that a test
scripts."""

import asyncio
import json
import re
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lifecycle.core.events import CallEnded
from lifecycle.vocabulary import CallEnd
from tests.proxy.live_server import RawClient
from tests.proxy.scripted_upstream import Exchange, Script
from tests.proxy.strict_loop import StrictLoop
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import SECONDS, Whole, user, whole_proxy

T = TypeVar("T")

CHAT = b"/v1/chat/completions"
ROADS = (CHAT, b"/v1/completions", b"/v1/embeddings")
"""A call that is followed, inference that is not, and a path that is only piped."""

_PROBES = (b"/v1/models", b"/version", b"/tokenize")
_LABEL = re.compile(rb',"session_id":"s_[-\w]+"')


class Torture:
    """The proxy and the loop that it runs on; between two `run`s it stands still."""

    def __init__(self, it: Whole, runner: asyncio.Runner) -> None:
        self.it = it
        self.port = int(it.up.data_url.rpartition(":")[2])
        self._runner = runner
        self._clients: list[RawClient] = []
        self._toy = it.toy.script

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Bounded, so that a hang is a failure; which leaves no client behind for the next test."""
        try:
            return self._runner.run(asyncio.wait_for(coroutine, 6 * SECONDS))
        finally:
            for client in self._clients:
                client.hang_up()
            self._clients.clear()

    def engine(self, script: Script) -> None:
        """From now on the engine does this, except to what the proxy asks it for itself."""

        async def beside_probes(exchange: Exchange) -> None:
            if exchange.target.split(b"?")[0] in _PROBES and exchange.method == "GET":
                await self._toy(exchange)
            else:
                await script(exchange)

        self.it.engine.script = beside_probes

    async def client(self) -> RawClient:
        client = await RawClient.connect(self.port)
        self._clients.append(client)
        return client

    @property
    def arrived(self) -> Exchange:
        """What the engine was asked last."""
        return self.it.engine.exchanges[-1]

    async def until_in_flight(self, num_calls: int) -> None:
        """Until so many calls are under way, as `/metrics` says."""
        async with asyncio.timeout(SECONDS):
            while f"kvtether_calls_in_flight {num_calls}.0" not in (await self.it.admin.get("/metrics")).text:
                pass

    async def end_of(self, call: str) -> CallEnd:
        """How the books end the call with this id, once nothing of it is in flight."""
        async with asyncio.timeout(SECONDS):
            while True:
                for end in await self.it.events(CallEnded):
                    if end.call_id == call:
                        return CallEnd(end.end)
                await asyncio.sleep(0)


@contextmanager
def standing(directory: Path) -> Iterator[Torture]:
    """A proxy that is up while the block lasts."""
    with asyncio.Runner(loop_factory=StrictLoop) as runner:
        loop = runner.get_loop()
        ready: asyncio.Future[Whole] = loop.create_future()
        over = asyncio.Event()

        async def live() -> None:
            async with whole_proxy(directory) as it:
                ready.set_result(it)
                await over.wait()

        async def first(task: asyncio.Task[None]) -> Whole:
            await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return ready.result()

        async def last(task: asyncio.Task[None]) -> None:
            over.set()
            await task

        task = loop.create_task(live())
        try:
            yield Torture(runner.run(first(task)), runner)
        finally:
            runner.run(last(task))


def unlabelled(body: bytes) -> bytes:
    """A body without the label that enforce puts into calls that it follows."""
    return _LABEL.sub(b"", body, count=1)


def chat(**fields: object) -> bytes:
    return json.dumps({"model": NAME, "messages": [user("hi")], **fields}).encode()


def named(context: str, call: str) -> list[tuple[bytes, bytes]]:
    """The header that names a call."""
    return [(b"x-kv-lifecycle", f'ctx="{context}", call="{call}"'.encode())]
