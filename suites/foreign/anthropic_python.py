"""anthropic's Python SDK: both clients, streams, helpers, raw answers, tools, counted tokens, errors."""

import asyncio
from typing import Any

import case_log
from anthropic import Anthropic, AsyncAnthropic
from case_log import headers, shape

ARGUMENTS = case_log.arguments()
MODEL = ARGUMENTS.model
OPTIONS: dict[str, Any] = {"base_url": ARGUMENTS.base_url, "api_key": "any", "max_retries": 0, "timeout": 60}
CLIENT = Anthropic(**OPTIONS)
QUESTION: list[Any] = [{"role": "user", "content": "Which file holds the parser?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


def fields(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 16, **more}


def ask(**more: Any) -> Any:
    return CLIENT.messages.create(**fields(**more))


def gathered(events: Any) -> dict[str, Any]:
    """What a program makes of a stream, however it was cut: event types without repetition, and the text.

    The SDK's stream helper gives an event of its own with each that came, so types repeat in pairs.
    """
    kinds: list[str] = []
    text = ""
    for event in events:
        kinds += [event.type] if event.type not in kinds[-2:] else []
        if event.type == "content_block_delta":
            text += getattr(event.delta, "text", "")
    return {"kinds": kinds, "text": text}


def message() -> dict[str, Any]:
    return {"answer": shape(ask())}


def message_stream() -> dict[str, Any]:
    return gathered(ask(stream=True))


def message_stream_helper() -> dict[str, Any]:
    with CLIENT.messages.stream(**fields()) as stream:
        text = "".join(stream.text_stream)
        return {"text": text, "answer": shape(stream.get_final_message())}


def message_raw() -> dict[str, Any]:
    raw = CLIENT.messages.with_raw_response.create(**fields())
    return {"status": raw.status_code, **headers(raw.headers), "answer": shape(raw.parse())}


def message_raw_stream() -> dict[str, Any]:
    with CLIENT.messages.with_streaming_response.create(**fields(stream=True)) as raw:
        lines = list(raw.iter_lines())
    kinds = sorted({line for line in lines if line.startswith("event:")})
    return {"status": raw.status_code, **headers(raw.headers), "kinds": kinds, "last": lines[-2:]}


def message_options() -> dict[str, Any]:
    """Cache hints, a system of several blocks, unknown fields and headers."""
    system = [
        {"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "Answer."},
    ]
    answer = ask(
        system=system,
        stop_sequences=["never"],
        top_k=5,
        metadata={"user_id": "somebody"},
        extra_headers={"anthropic-beta": "any", "x-unknown": "kept"},
        extra_body={"unknown_field": [1, 2.50], "temperature": 0.0},
    )
    return {"answer": shape(answer)}


def message_tools() -> dict[str, Any]:
    return {"answer": shape(ask(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}))}


def message_tool_turn() -> dict[str, Any]:
    used = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Köln"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, used]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    return {"answer": shape(ask(messages=messages, tools=[WEATHER]))}


def message_large() -> dict[str, Any]:
    return {"answer": shape(ask(messages=[{"role": "user", "content": "word " * 2000}]))}


def counted() -> dict[str, Any]:
    return {"count": shape(CLIENT.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief."))}


def models() -> dict[str, Any]:
    return {"models": [shape(each) for each in CLIENT.models.list()]}


async def message_async() -> dict[str, Any]:
    async with AsyncAnthropic(**OPTIONS) as client:
        return {"answer": shape(await client.messages.create(**fields()))}


async def message_async_stream() -> dict[str, Any]:
    async with AsyncAnthropic(**OPTIONS) as client, client.messages.stream(**fields()) as stream:
        return gathered([event async for event in stream])


async def message_async_many() -> dict[str, Any]:
    async with AsyncAnthropic(**OPTIONS) as client:
        answers = await asyncio.gather(*(client.messages.create(**fields(max_tokens=4)) for _ in range(8)))
    return {"answers": [(answer.stop_reason, answer.usage.output_tokens) for answer in answers]}


CASES = {
    "messages": message,
    "messages: stream": message_stream,
    "messages: stream helper": message_stream_helper,
    "messages: raw answer": message_raw,
    "messages: raw stream": message_raw_stream,
    "messages: options": message_options,
    "messages: tools": message_tools,
    "messages: tool results": message_tool_turn,
    "messages: large prompt": message_large,
    "messages: async": message_async,
    "messages: async stream": message_async_stream,
    "messages: async, eight at once": message_async_many,
    "tokens counted": counted,
    "models: list": models,
}
REFUSED = {
    "error: unknown model": lambda: ask(model="nobody"),
    "error: value out of range": lambda: ask(extra_body={"temperature": 99.0}),
    "error: wrong type": lambda: ask(messages="no list"),
    "error: missing field": lambda: CLIENT.post("/v1/messages", cast_to=object, body={"model": MODEL}),
    "error: not JSON": lambda: CLIENT.post("/v1/messages", cast_to=object, content=b"{not json"),
    "error: prompt too long": lambda: ask(messages=[{"role": "user", "content": "word " * 9000}]),
    "error: stream of a bad call": lambda: list(ask(stream=True, max_tokens=-1)),
    "error: models: retrieve": lambda: CLIENT.models.retrieve(MODEL),
    "error: batches": lambda: CLIENT.messages.batches.list(),
    "error: legacy completion": lambda: CLIENT.completions.create(
        model=MODEL, prompt="\n\nHuman: x\n\nAssistant:", max_tokens_to_sample=4
    ),
    "error: timeout of the client": lambda: CLIENT.with_options(timeout=0.001).messages.create(**fields()),
}

if __name__ == "__main__":
    case_log.run(CASES, REFUSED)
