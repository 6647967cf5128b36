"""The engine's HTTP surface over a real socket, with the client that agents use."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from engine_bridge.errors import RejectedByEngine
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.model_profile import ModelProfile
from engine_bridge.mapping.verify import probes, verify
from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.hardware import INSTANT, EngineConfig
from engine_bridge.sim.model_files import MODEL_DIRECTORY
from engine_bridge.sim.replies import Asked, Reply, ToolUse

NAME = "tiny"
CHUNK = 64
CONFIG = EngineConfig(hardware=INSTANT, chunk_tokens=CHUNK, max_model_len=8192)
USER = {"role": "user", "content": "Which file holds the parser?"}
LONG = {"role": "system", "content": "Read before you write. " * 120}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def script(asked: Asked) -> Reply | None:
    if asked.tools and asked.messages[-1]["role"] == "user":
        return Reply(text="Looking.", tool_calls=(ToolUse("look", {"path": "ä.py"}),))
    return None


class Api:
    """A served engine and its clients."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.http = httpx.AsyncClient(base_url=engine.url, trust_env=False)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{engine.url}/v1",
            api_key="any",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> Any:
        extra = {key: fields.pop(key) for key in EXTRA if key in fields}
        return await self.openai.chat.completions.create(
            model=NAME, messages=list(messages), extra_body=extra, **fields
        )

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)


EXTRA = ("return_token_ids", "kv_transfer_params", "cache_salt", "ignore_eos", "session_id")


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with EmbeddedEngine(EmbeddedOptions(engine=CONFIG), script=script) as engine:
        api = Api(engine)
        yield api
        await api.openai.close()
        await api.http.aclose()


def cached(reply: Any) -> int:
    return int(reply.usage.prompt_tokens_details.cached_tokens)


async def test_a_stream_tells_what_a_whole_answer_tells(api: Api) -> None:
    whole = await api.chat(LONG, USER, max_tokens=30, return_token_ids=True)
    text, ids, reasons, usage, prompt = "", [], [], None, None
    stream = await api.chat(
        LONG, USER, max_tokens=30, stream=True, stream_options={"include_usage": True}, return_token_ids=True
    )
    async for piece in stream:
        usage = piece.usage or usage
        prompt = (piece.model_extra or {}).get("prompt_token_ids") or prompt
        for choice in piece.choices:
            text += choice.delta.content or ""
            ids += (choice.model_extra or {}).get("token_ids") or []
            reasons.append(choice.finish_reason)
    [choice] = whole.choices
    assert text == choice.message.content
    assert ids == choice.model_extra["token_ids"]
    assert prompt == whole.model_extra["prompt_token_ids"]
    assert [reason for reason in reasons if reason] == [choice.finish_reason]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, len(ids))
    assert (await api.post("/tokenize", messages=[LONG, USER])).json()["tokens"] == prompt


async def test_cached_tokens_are_those_that_were_not_computed(api: Api) -> None:
    first = await api.chat(LONG, USER, max_tokens=1)
    again = await api.chat(LONG, USER, max_tokens=1)
    salted = await api.chat(LONG, USER, max_tokens=1, cache_salt="tenant")
    assert (cached(first), cached(salted)) == (0, 0)
    assert cached(again) == first.usage.prompt_tokens // 16 * 16
    await api.post("/reset_prefix_cache")
    stats = {"cached_token_stats": True}
    loaded = await api.chat(LONG, USER, max_tokens=1, kv_transfer_params=stats)
    assert cached(loaded) == first.usage.prompt_tokens // CHUNK * CHUNK
    told = loaded.model_extra["kv_transfer_params"]["cached_token_stats"]
    assert told["num_lmcache_cached_tokens"] == cached(loaded)


async def test_of_a_bypassed_call_nothing_is_found_below_the_engine(api: Api) -> None:
    await api.chat(LONG, USER, max_tokens=1, kv_transfer_params={"lmcache.max_offload_tokens": 0})
    await api.post("/reset_prefix_cache")
    assert cached(await api.chat(LONG, USER, max_tokens=1)) == 0


async def test_a_script_calls_tools_and_its_reply_continues_the_chain(api: Api) -> None:
    reply = await api.chat(LONG, USER, tools=[TOOL])
    [choice] = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Looking.")
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"path": "ä.py"}')
    stream = await api.chat(LONG, USER, tools=[TOOL], stream=True)
    arguments = ""
    async for piece in stream:
        for each in piece.choices[0].delta.tool_calls or []:
            arguments += each.function.arguments or ""
    assert arguments == call.function.arguments
    echo = {"role": "assistant", "content": "Looking.", "tool_calls": [call.to_dict()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is in a.py."}
    following = await api.chat(LONG, USER, echo, result, tools=[TOOL], max_tokens=1)
    known = reply.usage.prompt_tokens + reply.usage.completion_tokens - 1
    assert cached(following) == known // 16 * 16


async def test_several_choices_differ_and_count_their_prompt_once(api: Api) -> None:
    reply = await api.chat(USER, n=3, max_tokens=12)
    assert len({choice.message.content for choice in reply.choices}) == 3
    one = await api.chat(USER, max_tokens=12)
    assert reply.usage.prompt_tokens == one.usage.prompt_tokens
    assert reply.usage.completion_tokens > one.usage.completion_tokens


async def test_completions_of_text_and_tokens(api: Api) -> None:
    ids = (await api.post("/tokenize", prompt="two words")).json()["tokens"]
    text = await api.openai.completions.create(model=NAME, prompt="two words", max_tokens=5)
    tokens = await api.openai.completions.create(model=NAME, prompt=ids, max_tokens=5)
    assert text.choices[0].text == tokens.choices[0].text
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (len(ids), 5)
    both = await api.openai.completions.create(model=NAME, prompt=["a", "b"], max_tokens=2)
    assert [choice.index for choice in both.choices] == [0, 1]
    stream = await api.openai.completions.create(model=NAME, prompt=ids, max_tokens=5, stream=True)
    assert "".join([piece.choices[0].text async for piece in stream]) == text.choices[0].text
    assert (await api.post("/detokenize", tokens=ids)).json() == {"prompt": "two words"}


async def test_it_says_what_it_is(api: Api) -> None:
    [card] = (await api.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == (NAME, 8192)
    assert card["root"] == api.engine.options.model_path
    assert "sim" in (await api.http.get("/version")).json()["version"]
    assert (await api.http.get("/health")).status_code == 200
    await api.chat(USER, max_tokens=3, ignore_eos=True)
    metrics = (await api.http.get("/metrics")).text
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{NAME}"}} 3.0' in metrics


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param"),
    [
        ("/v1/chat/completions", {"model": "other", "messages": [USER]}, 404, "NotFoundError", "model"),
        ("/v1/chat/completions", {"messages": []}, 400, "BadRequestError", None),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            400,
            "BadRequestError",
            "input_tokens",
        ),
        ("/v1/completions", {}, 400, "BadRequestError", "prompt"),
        ("/tokenize", {}, 400, "BadRequestError", "prompt"),
        ("/detokenize", {"tokens": "x"}, 400, "BadRequestError", "tokens"),
    ],
)
async def test_errors_have_vllms_shape(
    api: Api, path: str, body: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    answer = await api.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"], error["param"]) == (status, status, kind, param)
    assert error["message"]


async def test_what_is_not_there_is_not_found(api: Api) -> None:
    answer = await api.post("/v1/embeddings")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


async def test_a_body_that_is_no_json_is_refused(api: Api) -> None:
    for content in (b"{", b"[]"):
        answer = await api.http.post("/v1/chat/completions", content=content)
        assert answer.status_code == 400


async def test_the_proxys_mapper_agrees_with_the_engine_on_every_probe(api: Api) -> None:
    async def tokenize(body: dict[str, Any]) -> list[int]:
        answer = await api.http.post("/tokenize", json=body)
        if answer.status_code == 400:
            raise RejectedByEngine(answer.text)
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    found = await verify(ChatMapper(ModelProfile.load(MODEL_DIRECTORY, NAME)), tokenize)
    assert set(found.compared) == {probe.name for probe in probes()}
