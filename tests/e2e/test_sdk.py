"""An agent written with the SDK: what the log says is what it did, and nothing of it stays."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

import kvtether.http
from kvtether import Client, Context
from lifecycle.core.events import (
    CallArrived,
    ContextClosed,
    ContextCreated,
    DeclarationMismatched,
    OperationApplied,
    OperationHeld,
    OperationRejected,
    TrackingGapOpened,
)
from tests.e2e.agent import World, prose
from tests.e2e.engine_cache import NOWHERE, PLAIN
from tests.e2e.polling import SECONDS, polled


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Coder:
    """The agent: three turns, a helper on a fork, an edit, a question aside, a compaction, a last turn."""

    def __init__(self, world: World, client: Client, model: openai.AsyncOpenAI) -> None:
        self.world = world
        self.client = client
        self.model = model
        self.prompts: list[list[Any]] = []

    async def ask(self, messages: list[Any]) -> dict[str, str]:
        """A call of the current context; its answer as it goes into the list."""
        self.prompts.append(list(messages))
        name = self.world.cache.stack.options.model_name
        reply = await self.model.chat.completions.create(
            model=name, messages=messages, max_tokens=1, extra_body=PLAIN
        )
        return {"role": "assistant", "content": reply.choices[0].message.content or ""}

    async def work(self, name: str) -> None:
        async with Context(name, agent="coder", flow="run", client=self.client) as ctx:
            ctx.messages.append({"role": "system", "content": prose(70)})
            for _ in range(3):
                ctx.messages.append(user(prose(40)))
                ctx.messages.append(await self.ask(ctx.messages))

            async def cost_is_known() -> bool:
                return bool(await ctx.abefore_edit(1, 3))

            await polled(cost_is_known)  # the tokens of a call are known a moment after its answer

            async with ctx.fork(3, name=f"{name}-fork", agent="tester") as fork:
                fork.messages.append(user(prose(40)))
                fork.messages.append(await self.ask(fork.messages))

            ctx.messages[3] = user("edited")
            del ctx.messages[4:]
            ctx.messages.append(await self.ask(ctx.messages))

            async with ctx.one_off(name=f"{name}-aside"):
                await self.ask([user(prose(60))])

            async with ctx.compact(1, len(ctx.messages)) as job:
                summary = await self.ask([user(prose(60))])
                job.replace([user(prose(20) + summary["content"])])
            await self.ask(ctx.messages)


def streams(world: World, name: str) -> set[str]:
    """The log's streams of the contexts that are named so."""
    created = [e for e in world.heard if isinstance(e.event, ContextCreated)]
    return {e.stream for e in created if e.event.context_id == name}


def did(world: World, name: str) -> list[tuple[Any, ...]]:
    """What the log says of a context: edits with their span and number, calls with the length of the list."""
    told: list[tuple[Any, ...]] = []
    mine = streams(world, name)
    for event in (e.event for e in world.heard if e.stream in mine):
        match event:
            case OperationApplied(operation=operation):
                span = getattr(operation, "span", ())
                num = getattr(operation, "n", None)
                told.append((operation.__struct_config__.tag, *span, *(() if num is None else (num,))))
            case CallArrived(num_messages=num):
                told.append(("call", num))
            case _:
                pass
    return told


@asynccontextmanager
async def sdk(world: World) -> AsyncIterator[tuple[Client, openai.AsyncOpenAI]]:
    """The SDK's client and a model's client with its hooks, both of the world's proxy."""
    client = Client(f"{world.up.data_url}/v1", "any")
    http = kvtether.http.async_client(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{world.up.data_url}/v1", api_key="any", max_retries=0, http_client=http
    ) as model:
        yield client, model
    client.close()


async def test_an_agent_written_with_the_sdk_leaves_nothing_behind(world: World) -> None:
    name = f"sdk:{prose(2)}"
    async with sdk(world) as (client, model):
        coder = Coder(world, client, model)
        await coder.work(name)
        assert await client.aflush(SECONDS)

    await world.until(lambda: not any(s.open for s in world.runtime.tracker.contexts.states.values()))
    asked = coder.prompts
    keys = [await world.cache.keys(prompt) for prompt in asked]
    shared = sorted(
        {key for each, prompt in zip(keys, asked, strict=True) for key in each if len(prompt) > 1}
    )
    assert len(shared) >= 15
    await world.until_gone(shared)
    everything = sorted({key for each in keys for key in each})
    assert await world.cache.where(everything) == [NOWHERE] * len(everything)


async def test_the_log_says_what_an_agent_written_with_the_sdk_did(world: World) -> None:
    name = f"sdk:{prose(2)}"
    async with sdk(world) as (client, model):
        await Coder(world, client, model).work(name)
        assert await client.aflush(SECONDS)

    await world.until(lambda: len({e.stream for e in world.heard if isinstance(e.event, ContextClosed)}) == 4)
    assert did(world, name) == [
        ("call", 2),
        ("append", 1),
        ("append", 1),
        ("call", 4),
        ("append", 1),
        ("append", 1),
        ("call", 6),
        ("append", 1),
        ("replace", 3, 4, 1),
        ("remove", 4, 7),
        ("call", 4),
        ("append", 1),
        ("replace", 1, 5, 1),
        ("call", 2),
        ("close",),
    ]
    assert did(world, f"{name}-fork") == [("fork",), ("append", 1), ("call", 4), ("append", 1), ("close",)]
    assert did(world, f"{name}-aside") == [("call", 1)]
    created = {e.event.context_id: e.event for e in world.heard if isinstance(e.event, ContextCreated)}
    fork = created[f"{name}-fork"]
    assert (fork.forked, fork.fork_at, fork.agent, fork.flow) == (True, 3, "tester", "run")
    (summariser,) = created.keys() - {name, f"{name}-fork", f"{name}-aside"}
    assert created[summariser].one_off
    assert created[f"{name}-aside"].one_off
    doubts = (DeclarationMismatched, OperationHeld, OperationRejected, TrackingGapOpened)
    assert [e for e in world.heard if isinstance(e.event, doubts)] == []
