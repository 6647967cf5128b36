"""The real stack, started once a session: vLLM on the CPU, an LMCache server, a coordinator."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine_bridge.stack.engine_stack import EngineStack, StackOptions
from tests.e2e.agent import World, config_for, world_of
from tests.e2e.engine_cache import Cache

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def engine_stack() -> Iterator[EngineStack]:
    """A running stack with chunks of 64 tokens that stores generated tokens too.

    Without an engine environment the tests fail rather than pass unseen; `make e2e` builds it first. The
    stack is shared: a test that restarts a server leaves it running, and nobody may expect an empty cache.
    """
    # A lookup whose call never comes back, because a server died between them, keeps its chunks locked.
    locks = ("--l1-read-ttl-seconds", "60", "--l1-write-ttl-seconds", "60")
    stack = EngineStack(options=StackOptions(extra_lmcache=locks))
    asyncio.run(stack.start())
    yield stack
    asyncio.run(stack.stop())


@pytest.fixture
async def cache(engine_stack: EngineStack) -> AsyncIterator[Cache]:
    """Engine and cache, asked past the proxy."""
    cache = Cache(engine_stack)
    yield cache
    await cache.close()


@pytest.fixture
async def world(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> AsyncIterator[World]:
    """A proxy of its own in enforce, with a log of its own."""
    async with world_of(cache, config_for(engine_stack, tmp_path)) as world:
        yield world
