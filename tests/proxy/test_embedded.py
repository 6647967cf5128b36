"""The proxy with an engine of its own: one main life, cache pressure, restarts, and the command."""

import asyncio
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.replies import Asked, Reply, ToolUse, load_script
from lifecycle.core.events import CallMapped, ChunksGone
from lifecycle.vocabulary import MappingKind, Mode, Tier
from proxy.config import BackendConfig, Config
from proxy.embedded import embedded_config, embedded_options
from tests.architecture.deployment import REPOSITORY
from tests.architecture.test_readme import README, blocks
from tests.e2e.agent import prose, tool
from tests.e2e.engine_cache import BOTH, NOWHERE
from tests.e2e.polling import polled
from tests.e2e.test_lifecycle_main import long_run
from tests.e2e.test_lifecycle_untracked import by_bypass
from tests.proxy.embedded_world import CONFIG, config_in, embedded_engine, embedded_world, shared_proxy
from tests.proxy.test_cli import run, served

CHUNK_BYTES = CONFIG.chunk_bytes


def looks_twice(asked: Asked) -> Reply | None:
    """Calls a tool until two results are there."""
    if asked.num_tool_turns < 2:
        return Reply(
            text="One moment.", tool_calls=(ToolUse("look", {"path": f"{asked.num_tool_turns}.py"}),)
        )
    return Reply(text="It is in 1.py.")


async def test_a_compaction_frees_the_old_list_and_the_next_call_hits_what_was_kept(tmp_path: Path) -> None:
    async with embedded_world(embedded_engine(), config_in(tmp_path)) as world:
        cache = world.cache
        agent, prompts, generated = await long_run(world, 4)
        stored = prompts | generated
        await world.until_confirmed(await agent.keys())
        await cache.await_tiers(await agent.keys(), BOTH)
        kept = set(await cache.head_keys(agent.messages[:1], agent.tools))
        dead = sorted(stored - kept)
        assert len(kept) >= 5
        assert len(dead) >= 10
        await agent.ops({"op": "replace", "span": [1, len(agent.messages)], "n": 1})
        await world.until_gone(dead)
        assert await cache.where(dead) == [NOWHERE] * len(dead)
        assert await cache.where(sorted(kept)) == [BOTH] * len(kept)
        agent.messages = [agent.messages[0], {"role": "user", "content": prose(40)}]
        await cache.forget_engine_cache()
        await agent.call()
        assert agent.cached_tokens == cache.chunk * len(kept)
        assert {each.kind for each in world.events(CallMapped)} == {MappingKind.EXACT}


async def test_what_is_pinned_survives_a_full_cache(tmp_path: Path) -> None:
    room = {"l1_bytes": 60 * CHUNK_BYTES, "l2_bytes": 120 * CHUNK_BYTES, "evict_interval_ns": 5_000_000}
    engine, config = embedded_engine(**room), config_in(tmp_path, l2_pins=True)
    async with embedded_world(engine, config) as world:
        agents = [world.agent(name) for name in ("pinned", "other")]
        for agent in agents:
            await agent.say(prose(60))
        pinned, other = [await agent.keys() for agent in agents]
        await world.until_confirmed([*pinned, *other])
        await world.cache.await_tiers([*pinned, *other], BOTH)
        await agents[0].ops({"op": "pin", "span": [0, 2], "ttl": 600})
        held = await world.cache.head_keys(agents[0].messages[:2])
        crowd = world.agent("crowd")

        async def pushed_out() -> bool:
            await crowd.say(prose(60))
            return NOWHERE in await world.cache.where(other)

        await polled(pushed_out, 0.01)
        await world.until(lambda: world.events(ChunksGone))
        assert len(held) >= 5
        assert all(Tier.L2 in tiers for tiers in await world.cache.where(held))
        await world.cache.forget_engine_cache()
        await agents[0].call()
        assert agents[0].cached_tokens >= world.cache.chunk * len(held)


async def test_a_beginning_that_agents_share_outlives_each_of_them(tmp_path: Path) -> None:
    config = config_in(tmp_path, keep_recurring_seconds=600.0)
    async with embedded_world(embedded_engine(), config) as world:
        rules = prose(80)
        agents = [world.agent(name, system=rules) for name in ("one", "two", "three")]
        for agent in agents[:2]:
            await agent.say(prose(60))
        head = await world.cache.head_keys(agents[0].messages[:1])
        own = [key for agent in agents[:2] for key in await agent.keys() if key not in head]
        assert len(head) >= 3
        await world.until_confirmed([*head, *own])
        await world.cache.await_tiers([*head, *own], BOTH)
        for agent in agents[:2]:
            await agent.ops({"op": "close"})
        await world.until_gone(own)
        assert await world.cache.where(head) == [BOTH] * len(head)
        await world.cache.forget_engine_cache()
        await agents[2].say(prose(60))
        assert agents[2].cached_tokens == world.cache.chunk * len(head)


async def test_untracked_calls_turn_deletes_into_demotions(tmp_path: Path) -> None:
    async with embedded_world(embedded_engine(), config_in(tmp_path)) as world:
        agent = world.agent("tracked")
        await agent.say(prose(40))
        await by_bypass(world, agent.messages[0]["content"])
        keys = await agent.keys()
        await world.until_confirmed(keys)
        await world.cache.await_tiers(keys, BOTH)
        await agent.ops({"op": "close"})
        await world.cache.await_tiers(keys, frozenset({Tier.L2}))


async def test_a_script_drives_an_agent_with_tools(tmp_path: Path) -> None:
    engine = EmbeddedEngine(EmbeddedOptions(engine=CONFIG), script=looks_twice)
    async with embedded_world(engine, config_in(tmp_path)) as world:
        agent = world.agent("coder", tools=[tool("look")])
        agent.messages.append({"role": "user", "content": "Where is the parser?"})
        looked: list[str] = []
        while calls := (answer := await agent.call(100)).get("tool_calls"):
            looked += [json.loads(call["function"]["arguments"])["path"] for call in calls]
            agent.messages += [answer, {"role": "tool", "tool_call_id": calls[0]["id"], "content": prose(30)}]
        assert looked == ["0.py", "1.py"]
        assert answer["content"] == "It is in 1.py."
        assert agent.cached_tokens > 0


async def test_a_log_outlives_the_engine_and_what_it_says_of_the_cache_is_corrected(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with shared_proxy(embedded_engine(), config) as first, first.world() as world:
        agent = world.agent("survivor")
        await agent.say(prose(60))
        keys = await agent.keys()
        await world.until_confirmed(keys)
    async with shared_proxy(embedded_engine(), config) as second, second.world() as later:
        index = later.runtime.tracker.contexts.index
        await later.until(lambda: len(index.unverified(later.namespace, b"".join(keys))) == len(keys))
        agent.world = later
        await agent.say(prose(60))
        assert agent.cached_tokens == 0
        await later.until_confirmed(await agent.keys())


async def test_observe_frees_nothing(tmp_path: Path) -> None:
    async with embedded_world(embedded_engine(), config_in(tmp_path, Mode.OBSERVE)) as world:
        agent = world.agent("observed")
        await agent.say(prose(60))
        keys = await agent.keys()
        await world.until_confirmed(keys)
        await world.cache.await_tiers(keys, BOTH)
        await agent.ops({"op": "close"})
        await world.until(lambda: any(world.outcomes(keys).values()))
        assert {outcome.value for found in world.outcomes(keys).values() for outcome in found} == {
            "suppressed"
        }
        assert await world.cache.where(keys) == [BOTH] * len(keys)


@pytest.mark.long
async def test_the_command_serves_and_the_readmes_first_steps_work(tmp_path: Path) -> None:
    script = tmp_path / "script.yaml"
    script.write_text("- when: {contains: by heart}\n  reply: {text: As the script says.}\n")
    async with (
        served(tmp_path, "--embedded", "--script", str(script)) as (data, admin),
        httpx.AsyncClient(trust_env=False) as http,
    ):

        async def ready() -> bool:
            told = (await http.get(f"{admin}/readyz")).json()
            return bool(told["control"] and told["mode"] == "enforce" and not told["problems"])

        await polled(ready)
        body = {"messages": [{"role": "user", "content": "Say it by heart."}]}
        answer = (await http.post(f"{data}/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "As the script says."

        snippet = blocks(README, "python")[0].replace("http://127.0.0.1:8700", data)
        assert data in snippet
        assert re.search(r"prompt_tokens=\d+", await printed("-c", snippet))

        said = await printed(str(REPOSITORY / "examples" / "compaction.py"), data, admin)
    counts = re.search(r"(\d+) alive, (\d+) dead; gone: (\d+) alive, (\d+) dead", said)
    assert counts, said
    alive, dead, gone_alive, gone_dead = map(int, counts.groups())
    assert alive >= 5
    assert dead >= 30
    assert (gone_alive, gone_dead) == (0, dead)
    prompts = [(int(n), int(hit)) for n, hit in re.findall(r"prompt of (\d+) tokens, (\d+) of", said)]
    assert all(hit > before - 64 for (before, _), (_, hit) in pairwise(prompts[:12]))


async def test_what_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    for arguments, named in (
        (("--upstream", "http://127.0.0.1:9"), "--upstream"),
        (("--model-path", "absent"), "absent"),
    ):
        status, said = await run(tmp_path, "serve", "--embedded", *arguments)
        assert status == 2, said
        assert named in said
        assert "Traceback" not in said


async def printed(*arguments: str) -> str:
    """What a Python program of a user prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, out.decode()
    return out.decode()


def test_the_documented_python_script_answers() -> None:
    [block] = blocks((REPOSITORY / "docs" / "embedded-engine.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(block, names)
    script = names["engine"].speaker.script
    assert script(Asked([{"role": "user", "content": "really?"}], [], {})) == Reply(text="Yes.")
    assert script(Asked([], [], {})) is None


def test_the_documented_rules_are_a_script(tmp_path: Path) -> None:
    [block] = blocks((REPOSITORY / "docs" / "embedded-engine.md").read_text(), "yaml")
    (tmp_path / "script.yaml").write_text(block)
    assert load_script(tmp_path / "script.yaml")(Asked([{"role": "tool"}], [], {})) == Reply(text="It rains.")


def test_another_model_directory_is_taken() -> None:
    assert embedded_options("/models/mine").model_path == "/models/mine"
    assert embedded_options().engine.l2_bytes > 0


def test_engines_of_the_configuration_give_way_to_the_embedded_one() -> None:
    options = SimpleNamespace(model_path="/m", model_name="tiny")
    events = SimpleNamespace(endpoint="ipc://e", replay_endpoint="ipc://r")
    engine: Any = SimpleNamespace(url="http://127.0.0.1:1", options=options, events=events)
    several = (BackendConfig(name="a", url="http://a"), BackendConfig(name="b", url="http://b"))
    (only,) = embedded_config(Config(upstreams=several), engine).backends
    assert (only.url, only.events_endpoint, only.replay_endpoint) == (engine.url, "ipc://e", "ipc://r")
