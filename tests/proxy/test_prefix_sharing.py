"""Two conversations with a nonce of their own on the embedded engine: what they share, as they come and
normalised, and that what is normalised is mapped as the engine gets it."""

import json
import secrets
from array import array
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.chunk_keys import chunk_keys
from lifecycle.core.events import CallArrived, CallMapped
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import Mode
from proxy.normalisers import Normaliser
from tests.e2e.agent import World, lifecycle, prose
from tests.e2e.engine_cache import PLAIN
from tests.proxy.embedded_world import config_in, embedded_engine, embedded_world
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import system, user, whole_proxy

IS_JSON = {"content-type": "application/json"}


def billing() -> str:
    """As Claude Code signs a request: version and checksum are another conversation's, another request's."""
    version, checksum = secrets.token_hex(2)[:3], secrets.token_hex(3)[:5]
    return f"x-anthropic-billing-header: cc_version=2.1.39.{version}; cc_entrypoint=cli; cch={checksum};"


def conversation(rules: str) -> list[dict[str, Any]]:
    """What a gateway makes of a Messages call that puts its own line first: so the engine sees the billing
    line, which vLLM drops only where a system message begins with it."""
    system = f"Answer as the model that was asked for.\n{billing()}\nYou are an agent.\n{rules}"
    return [{"role": "system", "content": system}, {"role": "user", "content": prose(5)}]


async def cached_tokens(world: World, messages: list[dict[str, Any]], ctx: str) -> tuple[int, int]:
    """Tokens of a call's prompt that the engine found, and how many it has."""
    reply = await world.client.chat.completions.create(
        model=world.cache.stack.options.model_name,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=1,
        extra_headers=lifecycle(ctx=ctx),
        extra_body=PLAIN,
    )
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0, reply.usage.prompt_tokens


@pytest.mark.parametrize("kinds", [(), (Normaliser.CLAUDE_BILLING,)])
async def test_a_billing_nonce_costs_every_new_conversation_its_system_prompt(
    tmp_path: Path, kinds: tuple[Normaliser, ...]
) -> None:
    async with embedded_world(embedded_engine(), config_in(tmp_path, normalise=kinds)) as world:
        rules = prose(200)
        first, second = conversation(rules), conversation(rules)
        await cached_tokens(world, first, "one")
        found, total = await cached_tokens(world, second, "two")
        mapped = await world.until(lambda: world.events(CallMapped)[1:])
        chunk = world.cache.chunk
        line = str(second[0]["content"]).split("\n")[1]
        without = [{**m, "content": str(m["content"]).replace(f"{line}\n", "")} for m in second]
        asked = without if kinds else second
        tokens = await world.cache.tokens(asked)
        keys = await world.cache.keys_of(tokens)
        # What the proxy computed of the call is what the engine itself makes of what it got, and stored.
        assert total == len(tokens) == mapped[0].num_tokens
        assert split_keys(mapped[0].keys) == keys[mapped[0].first_chunk :]
        await world.until_confirmed(keys)
        arrived = world.events(CallArrived)
        assert [event.normalised for event in arrived] == [tuple(kinds)] * 2
        view = await world.view("two")
        if kinds:
            assert found >= total - 2 * chunk, "all but the question"
            assert view["lint"]["beside"]["count"] == 0
        else:
            assert found <= chunk
            (finding,) = view["lint"]["last"]
            assert (finding["kind"], finding["index"], finding["role"]) == ("billing", 0, "system")
            assert finding["lost_tokens"] >= total - 3 * chunk
        print(f"\n{found} of {total} tokens found with {kinds or 'nothing'}")


async def test_in_bypass_nothing_is_cut_out(tmp_path: Path) -> None:
    config = config_in(tmp_path, Mode.BYPASS, normalise=tuple(Normaliser))
    async with embedded_world(embedded_engine(), config) as world:
        messages = conversation(prose(20))
        _, total = await cached_tokens(world, messages, "one")
        assert total == len(await world.cache.tokens(messages))


MOMENT = "Current time: 2026-11-30T14:03:22Z"
LEFT = "Current time: 2026-11-30"
WARNING = "<system_warning>Token usage: 35000/200000; 165000 remaining</system_warning>"
SHOWN = "<system_warning>Token usage: not shown</system_warning>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [system(MOMENT), user(WARNING)]}),
        ("/v1/messages", {"system": MOMENT, "messages": [user(WARNING)], "max_tokens": 5}),
        ("/v1/responses", {"instructions": MOMENT, "input": WARNING}),
        ("/v1/responses", {"instructions": "Be good.", "input": [system(MOMENT), user(WARNING)]}),
    ],
)
async def test_what_is_normalised_is_mapped_as_the_engine_gets_it(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with whole_proxy(tmp_path, normalise=tuple(Normaliser)) as it:
        sent = json.dumps({"model": NAME, **body}, indent=1)
        answer = await it.data.post(path, content=sent, headers={**lifecycle(ctx="c"), **IS_JSON})
        assert answer.status_code == 200, answer.text
        await it.runtime.mailboxes.settled()
        assert it.toy.bodies[-1].startswith(
            sent.replace(MOMENT, LEFT).replace(WARNING, SHOWN).rstrip("}\n").encode()
        ), "every other byte is as it came"
        (mapped,) = await it.events(CallMapped)
        engine = it.toy.prompts[-1]
        assert mapped.num_tokens == len(engine)
        assert mapped.keys == chunk_keys(array("I", engine), CHUNK)
        (arrived,) = await it.events(CallArrived)
        assert arrived.normalised == ("date_in_system", "token_countdown")
        metrics = (await it.admin.get("/metrics")).text
        assert 'kvtether_normalised_total{kind="date_in_system"} 1.0' in metrics
