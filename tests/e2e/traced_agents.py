"""Trace replays through the proxy, and what the cache holds of them against what the books say."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from engine_bridge.cache_events import BlocksStored, EventSubscriber
from engine_bridge.sim.replay import CallOutcome, ReplayOptions, replay
from engine_bridge.sim.traces.calls import Call
from engine_bridge.sim.traces.texts import Texts, counted_by
from lifecycle.core.events import CallEnded, DeclarationMismatched, DirectiveSettled, OperationRejected
from lifecycle.core.ids import split_keys
from lifecycle.projections.contexts import Contexts
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import Tier
from tests.e2e.agent import World
from tests.e2e.engine_cache import PLAIN
from tests.e2e.test_lifecycle_books import assert_books_equal_a_recount
from tests.lifecycle.lives import books

POLL_SECONDS = 0.5
NUM_POLLS = 180
"""Longer than the 60 seconds for which a branch that was left without a word is doubted."""

Present = Callable[[], Awaitable[set[bytes]]]
"""Answers every key that the cache holds in some tier."""


@asynccontextmanager
async def stores(endpoint: str) -> AsyncIterator[set[bytes]]:
    """Keys that the engine's own events report as stored in the cache, heard past the proxy."""
    heard: set[bytes] = set()

    async def listen() -> None:
        async for batch in EventSubscriber(endpoint).batches():
            for event in batch.events:
                if isinstance(event, BlocksStored) and event.tier is Tier.L1:
                    heard.update(event.keys)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(listen())
        yield heard
        task.cancel()


def live_keys(contexts: Contexts) -> set[bytes]:
    """Keys on the chain of something that may go on, counted anew from the contexts."""
    return {
        key
        for state in contexts.states.values()
        for version in state.versions.values()
        for key in split_keys(version.keys)
    }


UNPROVEN_ONE_IN = 1000
"""Of so many chunks one may not be proven ours, and then stays: where a busy machine looks a call up after
the engine stored it, a chunk that ends with its first step may as well have been loaded."""


class Account:
    """A replay's chunks. `reported` are the keys that the engine's own events told of, `before` those that
    lay in the cache when it began."""

    def __init__(self, world: World, present: Present, before: set[bytes], reported: set[bytes]) -> None:
        self.world = world
        self.present = present
        self.before = before
        self.reported = reported

    @property
    def live(self) -> set[bytes]:
        return live_keys(self.world.runtime.tracker.contexts)

    async def zombies(self) -> set[bytes]:
        """What lies in the cache and belongs to nothing that may go on."""
        present = await self.present()
        return present - self.before - self.live

    async def missing(self) -> set[bytes]:
        """What was reported as stored, may be needed again, and is not there."""
        present = await self.present()
        return (self.live & self.reported) - present

    async def settled(self) -> None:
        """Until neither is left: no event says that a reclaim was the last one."""
        for _ in range(NUM_POLLS):
            if not await self.zombies() and not await self.missing():
                return
            await asyncio.sleep(POLL_SECONDS)
        zombies, missing = await self.zombies(), await self.missing()
        index, namespace = self.world.runtime.tracker.contexts.index, self.world.namespace
        proven = zombies - set(index.unproven(namespace, b"".join(sorted(zombies))))
        assert not proven, self._described(zombies)
        assert len(zombies) * UNPROVEN_ONE_IN <= len(self.reported), self._described(zombies)
        assert not missing, self._described(missing)

    def _described(self, keys: set[bytes]) -> str:
        index, namespace = self.world.runtime.tracker.contexts.index, self.world.namespace
        kinds = Counter(str(getattr(index.describe(namespace, key), "flags", None)) for key in keys)
        some = [str(index.describe(namespace, key))[:600] for key in sorted(keys)[:3]]
        return f"{len(keys)} keys by their flags {dict(kinds)}; among them {some}"


async def played(
    world: World,
    traces: Mapping[str, Iterable[Call]],
    num_concurrent_sessions: int = 3,
    *,
    declares: bool = True,
) -> list[CallOutcome]:
    """All traces at once, each under its own name and with texts of its own."""
    stack = world.cache.stack
    count = counted_by(Path(stack.model_path) / "tokenizer.json")
    told: list[CallOutcome] = []
    async with asyncio.TaskGroup() as group:
        for name, calls in traces.items():
            options = ReplayOptions(
                base_url=f"{world.up.data_url}/v1",
                model=stack.options.model_name,
                name=name,
                declares=declares,
                num_concurrent_sessions=num_concurrent_sessions,
                body={**PLAIN, "temperature": 0},
            )
            group.create_task(replay(calls, Texts(count, salt=name), options, told.append))
    assert [outcome.error for outcome in told if outcome.error] == []
    return told


async def closed(world: World) -> None:
    """Close every context that is still open."""
    states = world.runtime.tracker.contexts.states.values()
    for uid in sorted(state.uid for state in states if not state.closed):
        reply = await world.http.post(f"{world.up.admin_url}/kv/v1/contexts/{uid}/close")
        reply.raise_for_status()


async def assert_the_dead_are_gone_and_the_living_are_there(
    account: Account, told: list[CallOutcome]
) -> tuple[int, int]:
    """After a replay: first with the contexts that are open, then with all of them closed. Answers how many
    chunks were stored, and how many of them had died before the end."""
    world = account.world
    await world.until(lambda: len(world.events(CallEnded)) == len(told))
    await account.settled()
    stored = account.reported - account.before
    died = len(stored - account.live)
    assert account.live, "or this shows nothing"
    print("\n" + summary(told, account))
    assert_books_equal_a_recount(world)
    await closed(world)
    await account.settled()
    assert not account.live
    assert not (await account.present()) - account.before
    return len(stored), died


async def assert_the_log_says_it_all(log_url: str, lived: Contexts) -> None:
    """Replayed from zero, up to where the proxy had read it when it stopped, it gives what was true then."""
    log = (await open_log(log_url)).event_log
    from_zero = Contexts()
    try:
        async for recorded in log.read_all():
            if recorded.position <= lived.position:
                from_zero.apply(recorded)
    finally:
        await log.close()
    assert from_zero.position == lived.position > 0
    assert from_zero.states == lived.states
    assert from_zero.directives == lived.directives
    assert books(from_zero) == books(lived)


def summary(told: Sequence[CallOutcome], account: Account) -> str:
    """The replay in figures."""
    world = account.world
    facts = {
        "calls": len(told),
        "contexts": len({outcome.context_id for outcome in told}),
        "prompt tokens": sum(outcome.prompt_tokens for outcome in told),
        "of them cached": sum(outcome.cached_tokens for outcome in told),
        "changes": dict(Counter(change.kind.value for outcome in told for change in outcome.call.before)),
        "lists other than declared": len(world.events(DeclarationMismatched)),
        "operations rejected": len(world.events(OperationRejected)),
        "chunks stored": len(account.reported - account.before),
        "chunks alive": len(account.live),
        "directives": dict(Counter(e.result.outcome.value for e in world.events(DirectiveSettled))),
    }
    return "\n".join(f"{name:<26} {value}" for name, value in facts.items())
