"""The embedded engine answers as vLLM does: same fields, same refusals, same hits."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.hardware import INSTANT, EngineConfig
from engine_bridge.stack.engine_stack import EngineStack
from tests.e2e.agent import prose, tool
from tests.e2e.engine_cache import PLAIN

CHUNK_TOKENS = 64
TEXT = [{"role": "user", "content": "Which file holds the parser?"}]
CHAT = {"model": "tiny", "messages": TEXT, "max_tokens": 8, "ignore_eos": True, **PLAIN}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "kv_transfer_params": {"cached_token_stats": True}}),
    ("/v1/completions", {"model": "tiny", "prompt": "two words", "max_tokens": 4, "ignore_eos": True}),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True, "ignore_eos": True},
    ),
    ("/tokenize", {"model": "tiny", "messages": TEXT}),
    ("/tokenize", {"model": "tiny", "prompt": "two words", "return_token_strs": True}),
    ("/detokenize", {"model": "tiny", "tokens": [100, 101]}),
]
STREAMS: list[dict[str, Any]] = [
    {**CHAT, "messages": TEXT, **USAGE},
    {**CHAT, "messages": TEXT, **USAGE, "return_token_ids": True},
]
REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "model": "other"}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 0}),
    ("/v1/chat/completions", {**CHAT, "cache_salt": ""}),
    ("/v1/completions", {"model": "tiny", "prompt": [5] * 70_000}),
    ("/v1/nowhere", {}),
]


class Pair:
    """The real engine and the embedded one, of the same model directory."""

    def __init__(self, real: httpx.AsyncClient, ours: httpx.AsyncClient) -> None:
        self.real = real
        self.ours = ours

    async def post(self, path: str, body: dict[str, Any]) -> list[httpx.Response]:
        return [await each.post(path, json=body) for each in (self.real, self.ours)]


@pytest.fixture
async def pair(engine_stack: EngineStack) -> AsyncIterator[Pair]:
    machine = msgspec.structs.replace(INSTANT, hbm_bytes=20_000_000_000)
    config = EngineConfig(hardware=machine, block_tokens=32, chunk_tokens=CHUNK_TOKENS, max_model_len=65_536)
    options = EmbeddedOptions(model_path=engine_stack.model_path, engine=config)
    async with (
        EmbeddedEngine(options) as engine,
        httpx.AsyncClient(base_url=engine_stack.upstream_url, timeout=60, trust_env=False) as real,
        httpx.AsyncClient(base_url=engine.url, timeout=60, trust_env=False) as ours,
    ):
        yield Pair(real, ours)


def shape(value: Any, path: str = "") -> set[str]:
    """Every path to a value that is there, with its kind; entries of a list count as one."""
    if isinstance(value, dict):
        return {found for key, each in value.items() for found in shape(each, f"{path}.{key}")}
    if isinstance(value, list):
        return {found for each in value[:3] for found in shape(each, f"{path}[]")}
    return set() if value is None else {f"{path}: {type(value).__name__}"}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), ANSWERS)
async def test_answers_have_only_fields_that_vllms_have(pair: Pair, path: str, body: dict[str, Any]) -> None:
    real, ours = await pair.post(path, body)
    assert (real.status_code, ours.status_code) == (200, 200), (real.text, ours.text)
    assert shape(ours.json()) <= shape(real.json())
    if "usage" in real.json():
        told = [each.json()["usage"] for each in (real, ours)]
        assert told[0]["prompt_tokens"] == told[1]["prompt_tokens"]
        assert told[0]["completion_tokens"] == told[1]["completion_tokens"]
    if path == "/tokenize":
        assert ours.json() == real.json()


@pytest.mark.parametrize("body", STREAMS)
async def test_streams_have_only_fields_that_vllms_have(pair: Pair, body: dict[str, Any]) -> None:
    real, ours = [events(each.text) for each in await pair.post("/v1/chat/completions", body)]
    assert {found for each in ours for found in shape(each)} <= {
        found for each in real for found in shape(each)
    }
    for told in (real, ours):
        assert told[0]["choices"][0]["delta"]["role"] == "assistant"
        assert told[-1]["choices"] == []
    assert ours[-1]["usage"]["prompt_tokens"] == real[-1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("path", "body"), REFUSALS)
async def test_refusals_are_the_same(pair: Pair, path: str, body: dict[str, Any]) -> None:
    real, ours = await pair.post(path, body)
    assert (ours.status_code, ours.json()) == (real.status_code, real.json())


async def test_the_same_conversation_has_the_same_hits(pair: Pair) -> None:
    """A tool turn, an edit in the middle, then once more from the cache below."""
    messages = [{"role": "system", "content": prose(70)}, {"role": "user", "content": prose(40)}]
    body = {**CHAT, "tools": [tool("look")], "max_tokens": 1}
    hits: list[list[int]] = []
    for edit in (None, "append", "edit", "forget"):
        if edit == "append":
            messages += [{"role": "assistant", "content": prose(20)}, {"role": "user", "content": prose(20)}]
        elif edit == "edit":
            messages[1] = {"role": "user", "content": prose(30)}
        elif edit == "forget":
            for engine in (pair.real, pair.ours):
                (await engine.post("/reset_prefix_cache")).raise_for_status()
        told = await pair.post("/v1/chat/completions", {**body, "messages": messages})
        hits.append([each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0 for each in told])
    assert hits[0] == [0, 0]
    assert all(real == ours for real, ours in hits[:3]), hits
    # Of a prompt that ends with a chunk the real engine computes the last block, ours the last chunk.
    assert abs(hits[3][0] - hits[3][1]) < CHUNK_TOKENS, hits
    assert hits[3][1] > hits[2][1] > 0


async def test_the_model_is_listed_alike(pair: Pair) -> None:
    real, ours = [(await each.get("/v1/models")).json()["data"][0] for each in (pair.real, pair.ours)]
    for field in ("id", "object", "root", "parent", "max_model_len"):
        assert ours[field] == real[field], field
