import json

import httpx
import openai
import pytest

from harnesses.conversation import CHAT, MESSAGES, RESPONSES
from harnesses.engine import MODEL_NAME
from harnesses.model_server import TRUTH_HEADER
from lifecycle.vocabulary import Tier
from tests.harnesses.talk import TOOLS, schema, user

TASK = [user("[[task tools#t1]] Look.")]
FLAT = [{"type": "function", "name": "shell", "parameters": schema("command"), "strict": False}]
THEIRS = [{"name": "Bash", "input_schema": schema("command")}]


@pytest.fixture
async def client(model):
    plain = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{model.url}/v1", api_key="any", max_retries=0, http_client=plain
    ) as opened:
        yield opened


@pytest.fixture
async def http(model):
    async with httpx.AsyncClient(base_url=model.url, trust_env=False) as opened:
        yield opened


def events(text):
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields.get("event"), fields["data"]))
    return found


async def test_a_chat_says_the_same_whole_and_streamed(client):
    whole = await client.chat.completions.create(model=MODEL_NAME, messages=TASK, tools=TOOLS)
    (choice,) = whole.choices
    async with client.chat.completions.stream(
        model=MODEL_NAME, messages=TASK, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        streamed = await stream.get_final_completion()
    (other,) = streamed.choices
    assert choice.finish_reason == other.finish_reason == "tool_calls"
    assert choice.message.content == other.message.content
    one, two = choice.message.tool_calls[0].function, other.message.tool_calls[0].function
    assert (one.name, one.arguments) == (two.name, two.arguments)
    assert streamed.usage.prompt_tokens == whole.usage.prompt_tokens
    assert streamed.usage.prompt_tokens_details.cached_tokens > 0


async def test_a_response_says_the_same_whole_and_streamed(client):
    whole = await client.responses.create(model=MODEL_NAME, input=TASK, tools=FLAT)
    async with client.responses.stream(model=MODEL_NAME, input=TASK, tools=FLAT) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    assert streamed.output_text == whole.output_text
    assert streamed.output[-1].arguments == whole.output[-1].arguments


async def test_a_response_that_names_another_goes_on_with_it(client, model):
    first = await client.responses.create(model=MODEL_NAME, input="[[task talk#t2]] Hello, you.")
    await client.responses.create(model=MODEL_NAME, input="And?", previous_response_id=first.id)
    one, two = (each.computed for each in model.exchanges)
    assert two.prompt[: len(one.prompt)] == one.prompt
    assert len(two.prompt) > len(one.prompt) + 10


async def test_a_message_streams_the_documented_events(http):
    body = {"model": MODEL_NAME, "max_tokens": 1000, "messages": TASK, "tools": THEIRS}
    whole = (await http.post(MESSAGES, json=body)).json()
    text, use = whole["content"]
    assert (whole["stop_reason"], use["name"]) == ("tool_use", "Bash")
    told = events((await http.post(MESSAGES, json={**body, "stream": True})).text)
    documents = [json.loads(data) for _, data in told]
    assert [name for name, _ in told] == [each["type"] for each in documents]
    kinds = [each["type"] for each in documents if each["type"] not in ("content_block_delta", "ping")]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [each["delta"] for each in documents if each["type"] == "content_block_delta"]
    assert "".join(d.get("text", "") for d in deltas) == text["text"]
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == use["input"]


async def test_tokens_are_counted_as_the_engine_counts_them(http):
    body = {"model": MODEL_NAME, "messages": TASK}
    counted = (await http.post(f"{MESSAGES}/count_tokens", json=body)).json()["input_tokens"]
    whole = (await http.post(MESSAGES, json={**body, "max_tokens": 9})).json()["usage"]
    assert counted == whole["input_tokens"] + whole["cache_read_input_tokens"]
    assert (await http.post("/tokenize", json=body)).json()["count"] == counted


async def test_the_model_is_listed_and_what_is_not_there_is_noted(client, http, model):
    assert [each.id async for each in await client.models.list()] == [MODEL_NAME]
    assert (await http.get("/v1/nowhere")).status_code == 404
    assert model.unknown == {"/v1/nowhere"}


async def test_every_inference_is_recorded_as_it_came(http, model, tmp_path):
    for path, body in ((CHAT, {"messages": TASK}), (RESPONSES, {"input": "[[task talk#t4]]"})):
        sent = {"model": MODEL_NAME, **body}
        await http.post(path, json=sent, headers={TRUTH_HEADER: "mine"})
        line = json.loads((tmp_path / "requests.jsonl").read_text().splitlines()[-1])
        assert (line["path"], line["body"]) == (path, sent)
        assert [TRUTH_HEADER, "mine"] in line["headers"]
        assert line["answer"]["content"] == model.exchanges[-1].answer.reply.text


async def test_what_no_engine_would_take_is_answered_and_marked(http, model):
    grammar = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
    reply = await http.post(RESPONSES, json={"model": MODEL_NAME, "input": TASK, "tools": [grammar, *FLAT]})
    assert reply.status_code == 200
    assert "grammar" in model.exchanges[-1].computed.reason


async def test_a_chunk_that_was_freed_and_is_needed_again_is_missing(http, model):
    body = {"model": MODEL_NAME, "messages": [user("[[task talk#t5]] " + "Word after word. " * 80)]}
    await http.post(CHAT, json=body)
    first = model.exchanges[-1].computed
    assert not first.missing
    await http.post(CHAT, json=body)
    assert not model.exchanges[-1].computed.missing
    assert model.engine.left() >= set(first.prompt_keys)
    gone = first.prompt_keys[1]
    model.engine.runner.delete("", [gone], frozenset({Tier.L1, Tier.L2}))
    await http.post(CHAT, json=body)
    assert model.exchanges[-1].computed.missing.keys() == {gone}
