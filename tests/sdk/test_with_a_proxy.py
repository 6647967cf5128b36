"""Agents with the SDK on the whole proxy before the embedded engine: those of the real stack, and more."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from kvtether import Client, Context
from lifecycle.core.events import (
    BranchDoubted,
    DeclarationMismatched,
    OperationRejected,
    TrackingGapOpened,
)
from tests.e2e.agent import World, prose
from tests.e2e.polling import SECONDS
from tests.e2e.test_sdk import (  # noqa: F401 - its tests are collected here too
    did,
    sdk,
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


def doubted(world: World) -> list[object]:
    """What the log says of declarations that were not as they should be."""
    wrong = (DeclarationMismatched, OperationRejected, TrackingGapOpened, BranchDoubted)
    return [e.event for e in world.heard if isinstance(e.event, wrong)]


async def closed(world: World, *names: str) -> None:
    def is_closed(name: str) -> bool:
        state = world.state(name)
        return state is not None and not state.open and state.closed == "closed by its agent"

    await world.until(lambda: all(is_closed(name) for name in names))


async def test_agents_at_once_share_one_client(world: World) -> None:
    async with sdk(world) as (client, model):

        async def agent(name: str) -> None:
            async with Context(name, client=client) as ctx:
                ctx.messages.append({"role": "system", "content": prose(20)})
                for turn in range(4):
                    ctx.messages.append({"role": "user", "content": prose(20)})
                    reply = await model.chat.completions.create(
                        model="tiny", messages=ctx.messages, max_tokens=1
                    )
                    ctx.messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                    if turn % 2:
                        del ctx.messages[1:3]
                    ctx.waiting("tool", "look")

        names = [f"at-once-{prose(1)}-{n}" for n in range(6)]
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(agent(name))
        assert await client.aflush(SECONDS)
    await closed(world, *names)
    assert doubted(world) == []


async def test_an_agent_without_hooks_is_told_beside_its_calls(world: World) -> None:
    name = f"plain-{prose(1)}"

    def agent() -> None:
        client = Client(f"{world.up.data_url}/v1", "any")
        with (
            openai.OpenAI(base_url=f"{world.up.data_url}/v1", api_key="any") as model,
            Context(name, client=client) as ctx,
        ):
            for turn in range(4):
                ctx.messages.append({"role": "user", "content": prose(20)})
                model.chat.completions.create(
                    model="tiny", messages=ctx.messages, max_tokens=1, **ctx.call(waiting="human")
                )
                if turn == 2:
                    ctx.messages[:2] = [{"role": "user", "content": prose(5)}]
        assert client.flush(SECONDS)
        client.close()

    await asyncio.to_thread(agent)
    await closed(world, name)
    assert [d[0] for d in did(world, name) if d[0] != "call"] == ["append"] * 2 + [
        "replace",
        "append",
        "close",
    ]
    rejected = (OperationRejected, TrackingGapOpened)
    assert [e for e in world.heard if isinstance(e.event, rejected)] == []
