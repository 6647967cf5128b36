"""A proxy in a process of its own that dies at a chosen step, as a test tool.

A step is something durable that the proxy does: an append to its log, a change of its vault, an order to its
cache. Steps are counted from the moment on when the process is armed.
Processes are forked by a server that has imported everything, so that one starts in a fraction of a second.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import structlog

from engine_bridge.drivers.lmcache_pins import HeldPin, PinLedger, Reconciled
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.directives import Demote, Directive, DirectiveResult, Pin, Reclaim, Unpin
from lifecycle.core.events import CallEnded, CallVerified, Event, RecordedEvent
from lifecycle.core.ids import KEY_BYTES, Namespace, context_stream, split_keys
from lifecycle.ports import CacheCapabilities, EventLog, Presence, SelfTest
from lifecycle.store.alone import Alone
from lifecycle.store.opening import OpenLog, open_log
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, Tier
from proxy.app import serving
from proxy.config import Config
from proxy.mailbox import Mailboxes
from tests.lifecycle.fake_cache import EVERYTHING
from tests.lifecycle.lives import books
from tests.proxy.toy_model import CHUNK

SECONDS = 60.0
"""Bound of every wait."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        __name__,
        # What a proxy imports when it starts.
        "aiosqlite",
        "anyio._backends._asyncio",
        "httpcore",
        "pydantic.v1",
        "transformers.tokenization_python",
        "uvicorn.lifespan.off",
        "uvicorn.protocols.http.httptools_impl",
    ]
)


class Steps:
    """Counts; the process ends itself before or after step number `last` (0: never), having said where."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.count = 0
        self.last = 0
        self.moment = ""

    def arm(self, last: int, moment: str) -> None:
        self.count, self.last, self.moment = 0, last, moment

    async def take(self, name: str, work: Awaitable[Any]) -> Any:
        """One step, unless the process does not live to see it."""
        self.count += 1
        number = self.count
        self._die_at(number, "before", name)
        done = await work
        self._die_at(number, "after", name)
        return done

    def _die_at(self, number: int, moment: str, name: str) -> None:
        if (number, moment) == (self.last, self.moment):
            self.pipe.send(("died", f"{moment} step {number}, {name}"))
            os.kill(os.getpid(), signal.SIGKILL)


class CountedLog:
    """Appends are steps; what was acknowledged is told before anybody acts on it."""

    def __init__(self, inner: EventLog, steps: Steps) -> None:
        self.inner = inner
        self.steps = steps

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        async def append() -> Sequence[RecordedEvent]:
            recorded = await self.inner.append(stream, events, expected_version)
            self.steps.pipe.send(("acked", [(r.position, type(r.event).__name__) for r in recorded]))
            return recorded

        name = f"append of {', '.join(type(e).__name__ for e in events)}"
        recorded: Sequence[RecordedEvent] = await self.steps.take(name, append())
        return recorded

    def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        return self.inner.read_stream(stream, after_version)

    def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        return self.inner.read_all(after_position)

    async def head(self) -> int:
        return await self.inner.head()

    async def first_position(self) -> int:
        return await self.inner.first_position()

    async def trim(self, through: int, streams: Collection[str]) -> int:
        return await self.inner.trim(through, streams)

    async def close(self) -> None:
        await self.inner.close()


class CountedVault:
    """Changes of the vault are steps."""

    def __init__(self, inner: Any, steps: Steps) -> None:
        self.inner = inner
        self.steps = steps

    async def replace(self, entries: Mapping[str, bytes]) -> None:
        await self.steps.take("change of the vault", self.inner.replace(entries))

    async def load(self) -> dict[str, bytes]:
        found: dict[str, bytes] = await self.inner.load()
        return found


class FarCache:
    """Requests to the cache in the parent, over a loopback connection; orders are steps."""

    def __init__(self, port: int, steps: Steps) -> None:
        self.port = port
        self.steps = steps
        self.lock = asyncio.Lock()
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, kind: str, *arguments: Any) -> Any:
        async with self.lock:
            if self.streams is None:
                self.streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self.streams
            message = msgspec.msgpack.encode([kind, *arguments])
            writer.write(len(message).to_bytes(4, "big") + message)
            answer = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        return msgspec.msgpack.decode(answer)

    async def order(self, kind: str, *arguments: Any) -> Any:
        return await self.steps.take(f"order to {kind}", self.ask(kind, *arguments))

    # What a ledger of pins asks of its client.

    async def pins(self, model_name: str, salt: str) -> dict[Any, int]:
        pin = HeldPin(
            pin_id="",
            model_name=model_name,
            salt=salt,
            world_size=1,
            keys=b"".join(counted := dict(await self.ask("pins"))),
            token_ids=b"",
            lease_until_ns=0,
        )
        return dict(zip(pin.objects(), counted.values(), strict=True))

    async def pin(self, tokens: Sequence[int], model_name: str, world_size: int, salt: str) -> None:
        await self.order("pin", list(tokens))

    async def unpin(self, tokens: Sequence[int], model_name: str, world_size: int, salt: str) -> None:
        await self.order("unpin", list(tokens))


class FarDriver:
    """`CacheControl` and `PinHolder` whose cache outlives this process."""

    def __init__(self, far: FarCache, position: Callable[[], int]) -> None:
        self.far = far
        self.position = position
        self.ledger = PinLedger(far)  # type: ignore[arg-type]
        self.pin_lock = asyncio.Lock()

    @property
    def capabilities(self) -> CacheCapabilities:
        return CacheCapabilities(driver="far", level=1, supported=EVERYTHING, unsupported={})

    async def self_test(self) -> SelfTest:
        return SelfTest(ok=True, chunk_size=CHUNK, bytes_per_token=1)

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        try:
            found = await self.far.ask("locate", list(keys))
        except OSError as error:
            raise CacheUnavailable(str(error)) from error
        return [
            Presence(key, frozenset({Tier.L1, Tier.L2} if there else ()))
            for key, there in zip(keys, found, strict=True)
        ]

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        match directive:
            case Reclaim() | Demote():
                keys = split_keys(directive.keys)
                pinned = dict(await self.far.ask("pins"))
                dead = [key for key in keys if still_dead(key) and key not in pinned]
                kind = "delete" if isinstance(directive, Reclaim) else "demote"
                await self.far.order(kind, dead, self.position())
                left = len(keys) - len(dead)
                gone = b"".join(dead) if kind == "delete" else b""
                outcome = DirectiveOutcome.APPLIED
                return DirectiveResult(outcome=outcome, applied=len(dead), skipped=left, gone=gone)
            case Pin():
                known = self.ledger.find(directive.pin_id)
                tokens = token_ids()
                if tokens is None and known is not None and known.keys == directive.keys:
                    tokens = known.tokens()
                if tokens is None:
                    return DirectiveResult(outcome=DirectiveOutcome.REJECTED, reason="no tokens")
                count = len(directive.keys) // KEY_BYTES
                pin = HeldPin(
                    pin_id=directive.pin_id,
                    model_name=directive.namespace.model,
                    salt=directive.namespace.salt,
                    world_size=1,
                    keys=directive.keys,
                    token_ids=array("I", tokens[: count * CHUNK]).tobytes(),
                    lease_until_ns=directive.lease_until_ns,
                )
                async with self.pin_lock:
                    await self.ledger.hold(pin)
            case Unpin():
                async with self.pin_lock:
                    await self.ledger.release(directive.pin_id, directive.keys)
            case _:
                pass
        return DirectiveResult(outcome=DirectiveOutcome.APPLIED, applied=1)

    def held_pins(self) -> Sequence[HeldPin]:
        return self.ledger.held()

    def adopt_pins(self, pins: Sequence[HeldPin]) -> None:
        self.ledger.adopt(pins)

    def before_pin(self, keep: Callable[[], Awaitable[None]]) -> None:
        self.ledger.before_pin = keep

    async def incarnations(self) -> Mapping[str, int]:
        return {"far": 1}

    async def reconcile(self, now_ns: int, is_wanted: Callable[[HeldPin], bool]) -> Reconciled:
        async with self.pin_lock:
            return await self.ledger.reconcile(now_ns, is_wanted)

    async def release_all(self) -> int:
        async with self.pin_lock:
            return await self.ledger.release_all()

    async def close(self) -> None:
        if self.far.streams is not None:
            self.far.streams[1].close()


class Watch:
    """Knows when everything that was begun here has come to its end, after all contexts were closed."""

    def __init__(self, tracker: Tracker) -> None:
        self.contexts = tracker.contexts
        self.unverified: set[tuple[str, str, int]] = set()
        self.heard = asyncio.Event()
        tracker.listeners.append(self.hear)

    def hear(self, batch: Sequence[RecordedEvent]) -> None:
        for recorded in batch:
            match recorded.event:
                case CallEnded(call_id=call, attempt=attempt, end=CallEnd.COMPLETED):
                    # A one-off stores nothing: there is nothing to verify.
                    if not self.contexts.states[recorded.stream.removeprefix(context_stream(""))].one_off:
                        self.unverified.add((recorded.stream, call, attempt))
                case CallVerified(call_id=call, attempt=attempt):
                    self.unverified.discard((recorded.stream, call, attempt))
                case _:
                    pass
        self.heard.set()

    def __str__(self) -> str:
        index = self.contexts.index
        open_ones = [r.directive for r in self.contexts.directives.values() if r.result is None]
        stats = [index.stats(namespace) for namespace in index.namespaces()]
        return f"unverified: {self.unverified}, without outcome: {open_ones}, chunks: {stats}"

    def is_quiet(self) -> bool:
        index = self.contexts.index
        return (
            not self.unverified
            and all(record.result is not None for record in self.contexts.directives.values())
            and not any(
                index.stats(n).live or list(index.dead_runs(n, demoted=True)) for n in index.namespaces()
            )
        )

    async def until_quiet(self, mailboxes: Mailboxes) -> None:
        await mailboxes.settled()
        with suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                while not self.is_quiet():
                    self.heard.clear()
                    await self.heard.wait()


def run(config: Config, cache_port: int, pipe: Connection, armed: tuple[int, str]) -> None:
    """The process: serves until the step at which it dies, or until it is killed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_run(config, cache_port, pipe, armed))


async def _run(config: Config, cache_port: int, pipe: Connection, armed: tuple[int, str]) -> None:
    steps = Steps(pipe)
    steps.arm(*armed)

    async def opener(url: str) -> OpenLog:
        opened = await open_log(url)
        # Alone on its log: the next process must not wait until the lease of the dead one is over.
        opened = opened._replace(event_log=CountedLog(opened.event_log, steps), join=Alone)
        if (open_vault := opened.open_vault) is None:
            return opened

        async def counted() -> Any:
            return CountedVault(await open_vault(), steps)

        return opened._replace(open_vault=counted)

    tracker: list[Tracker] = []
    driver = FarDriver(FarCache(cache_port, steps), lambda: tracker[0].contexts.position)
    async with serving(config, driver, opener) as up:
        tracker.append(up.runtime.tracker)
        watch = Watch(up.runtime.tracker)
        await up.runtime.prepared.wait()
        pipe.send(("up", (up.data_url, up.admin_url)))
        commands: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
        while True:
            command, argument = await commands.get()
            if command == "arm":
                steps.arm(*argument)
                pipe.send(("armed", True))
            elif command == "settle":
                await up.runtime.mailboxes.settled()
                pipe.send(("settled", True))
            elif command == "quiet":
                await watch.until_quiet(up.runtime.mailboxes)
                contexts = up.runtime.tracker.contexts
                answer = (contexts.position, books(contexts)) if watch.is_quiet() else str(watch)
                pipe.send(("books", answer))
