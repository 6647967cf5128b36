"""Scenarios of the real stack on the embedded engine, word for word: it must be the model of the real one."""

import inspect
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e import (
    test_lifecycle_apis,
    test_lifecycle_books,
    test_lifecycle_doubt,
    test_lifecycle_forks,
    test_lifecycle_main,
    test_lifecycle_pins,
)
from tests.e2e.agent import World
from tests.proxy.embedded_world import Shared, config_in, embedded_engine, shared_proxy

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEFT_OUT = {
    # Compares log probabilities; `test_embedded` has the rest of it.
    test_lifecycle_main.test_a_compaction_frees_exactly_the_old_list,
    # The embedded engine does not speak that API.
    test_lifecycle_apis.test_a_messages_call_is_proven_and_freed,
    # Waits for seconds until a lease is over.
    test_lifecycle_pins.test_the_end_of_its_lease_frees_a_pin,
}


def scenarios(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """Tests that need a world and nothing of the stack behind it."""
    tests = {
        name: test for module in modules for name, test in vars(module).items() if name.startswith("test_")
    }
    return {
        name: test
        for name, test in tests.items()
        if test not in LEFT_OUT and "engine_stack" not in inspect.signature(test).parameters
    }


globals().update(
    scenarios(
        test_lifecycle_apis,
        test_lifecycle_books,
        test_lifecycle_doubt,
        test_lifecycle_forks,
        test_lifecycle_main,
        test_lifecycle_pins,
    )
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    """One proxy in enforce for all of them, whose pins the cache holds too."""
    config = config_in(tmp_path_factory.mktemp("lives"), l2_pins=True)
    async with shared_proxy(embedded_engine(), config) as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: Shared) -> AsyncIterator[World]:
    """Agents of their own, who hear only what happens from now on."""
    async with shared.world() as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def pinning(world: World) -> World:
    return world
