"""The scenarios of the real stack, word for word, on the whole proxy before the embedded engine."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.agent import World
from tests.e2e.test_sdk import (  # noqa: F401 - collected here too
    test_an_agent_written_with_the_sdk_leaves_nothing_behind,
    test_the_log_says_what_an_agent_written_with_the_sdk_did,
)
from tests.proxy.embedded_world import Shared, config_in, embedded_engine, shared_proxy

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    async with shared_proxy(embedded_engine(), config_in(tmp_path_factory.mktemp("sdk"))) as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: Shared) -> AsyncIterator[World]:
    async with shared.world() as world:
        yield world
