"""openai-python as programs use it: both clients, streams, helpers, raw answers, every family, errors."""

import asyncio
from typing import Any

import case_log
from case_log import headers, shape
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

ARGUMENTS = case_log.arguments()
MODEL = ARGUMENTS.model
CLIENT = OpenAI(base_url=f"{ARGUMENTS.base_url}/v1", api_key="any", max_retries=0, timeout=60)
SAID = 'Zeile eins\nline two: naïve 😀 café, 日本語 \\ " {end}'
"""Text that is hard on whoever cuts a stream in the wrong place."""

QUESTION: list[Any] = [{"role": "user", "content": "Which file holds the parser?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'


class Parsed(BaseModel):
    """An answer with only one form."""

    found: bool


def says(*texts: str) -> dict[str, Any]:
    """Body fields that leave a model of random weights no choice."""
    return {"structured_outputs": {"choice": list(texts)}}


def asynchronous() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{ARGUMENTS.base_url}/v1", api_key="any", max_retries=0, timeout=60)


def chat(**more: Any) -> Any:
    return CLIENT.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "extra_body": says(SAID), "max_tokens": 64, **more}
    )


def gathered(stream: Any) -> dict[str, Any]:
    """What a program makes of a stream of chat chunks, however it was cut."""
    roles, text, names, arguments, reasons, usage = [], "", [], "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
    seen = {"roles": roles[:1], "text": text, "names": names, "arguments": arguments, "reasons": reasons}
    return {**seen, "usage": shape(usage)}


def models_list() -> dict[str, Any]:
    return {"models": [shape(each) for each in CLIENT.models.list()]}


def chat_sync() -> dict[str, Any]:
    return {"answer": shape(chat())}


def chat_stream() -> dict[str, Any]:
    return gathered(chat(stream=True))


def chat_stream_usage() -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    return gathered(chat(stream=True, stream_options=options))


def chat_stream_helper() -> dict[str, Any]:
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=QUESTION, extra_body=says(SAID), max_tokens=64
    ) as stream:
        kinds = {event.type for event in stream}
        return {"kinds": sorted(kinds), "answer": shape(stream.get_final_completion())}


def chat_raw() -> dict[str, Any]:
    raw = CLIENT.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, extra_body=says(SAID), max_tokens=64
    )
    return {"status": raw.status_code, **headers(raw.headers), "answer": shape(raw.parse())}


def chat_raw_stream() -> dict[str, Any]:
    with CLIENT.chat.completions.with_streaming_response.create(
        model=MODEL, messages=QUESTION, extra_body=says(SAID), max_tokens=64, stream=True
    ) as raw:
        lines = list(raw.iter_lines())
    kinds = sorted({line.split(":")[0] for line in lines})
    return {"status": raw.status_code, **headers(raw.headers), "kinds": kinds, "last": lines[-2:]}


def chat_options() -> dict[str, Any]:
    """Sampling fields, an unknown field, unknown headers and query parameters."""
    answer = chat(
        temperature=0.7, top_p=0.9, seed=7, presence_penalty=0.1, stop=["never"], n=2, user="somebody",
        extra_headers={"x-unknown": "kept"}, extra_query={"trace": "a b"},
        extra_body={**says(SAID), "unknown_field": {"a": [1, 2.50, None]}}, metadata={"team": "a"},
    )  # fmt: skip
    return {"choices": len(answer.choices), "answer": shape(answer)}


def chat_logprobs() -> dict[str, Any]:
    answer = chat(logprobs=True, top_logprobs=2)
    return {"tokens": [each.token for each in answer.choices[0].logprobs.content]}


def chat_tools() -> dict[str, Any]:
    return {"answer": shape(chat(tools=[WEATHER], extra_body=says(CALLED)))}


def chat_tools_stream() -> dict[str, Any]:
    return gathered(chat(tools=[WEATHER], extra_body=says(CALLED), stream=True))


def chat_tool_named() -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "weather"}}
    return {"answer": shape(chat(tools=[WEATHER], tool_choice=named, extra_body=None))}


def chat_tool_turn() -> dict[str, Any]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"town":"Köln"}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain " * 300},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]},
    ]
    return {"answer": shape(chat(messages=messages, tools=[WEATHER]))}


def chat_parse() -> dict[str, Any]:
    answer = CLIENT.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Parsed)
    return {"parsed": shape(answer.choices[0].message.parsed)}


def chat_large() -> dict[str, Any]:
    messages = [{"role": "user", "content": "word " * 2000}]
    return {"answer": shape(chat(messages=messages))}


def chat_stopped_early() -> dict[str, Any]:
    """A client that leaves in the middle of a stream is served again."""
    stream = chat(stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    return {"answer": shape(chat())}


async def chat_async() -> dict[str, Any]:
    async with asynchronous() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, extra_body=says(SAID), max_tokens=64
        )
    return {"answer": shape(answer)}


async def chat_async_stream() -> dict[str, Any]:
    async with asynchronous() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, extra_body=says(SAID), max_tokens=64, stream=True
        )
        return gathered([chunk async for chunk in stream])


async def chat_async_many() -> dict[str, Any]:
    """Eight at once over one client."""
    async with asynchronous() as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=MODEL, messages=QUESTION, extra_body=says(f"answer {number}"), max_tokens=16
                )
                for number in range(8)
            )
        )
    return {"texts": [answer.choices[0].message.content for answer in answers]}


async def chat_async_cancelled() -> dict[str, Any]:
    """A call that its task gives up leaves the client usable."""
    async with asynchronous() as client:
        endless = {"ignore_eos": True}
        call = asyncio.ensure_future(
            client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=endless)
        )
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=says(SAID))
    return {"cancelled": call.cancelled(), "answer": shape(answer)}


def complete(**more: Any) -> Any:
    return CLIENT.completions.create(
        **{"model": MODEL, "prompt": "def parse(", "max_tokens": 32, "extra_body": says(SAID), **more}
    )


def completions() -> dict[str, Any]:
    return {"answer": shape(complete())}


def completions_stream() -> dict[str, Any]:
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    # Which piece it is depends on how the engine cut the stream.
    assert None not in texts, "a piece of the text is null"
    return {"text": "".join(texts), "usage": shape(chunks[-1].usage)}


def completions_options() -> dict[str, Any]:
    answer = complete(prompt=["one", "two"], echo=True, logprobs=1)
    texts = [(choice.index, choice.text) for choice in answer.choices]
    return {"texts": sorted(texts), "usage": shape(answer.usage)}


def completions_of_tokens() -> dict[str, Any]:
    return {"answer": shape(complete(prompt=[9707, 11, 1879]))}


def respond(**more: Any) -> Any:
    return CLIENT.responses.create(
        **{"model": MODEL, "input": "Which file?", "max_output_tokens": 32, "temperature": 0, **more}
    )


ONLY: Any = {
    "format": {
        "type": "json_schema",
        "name": "only",
        "schema": {"type": "object", "properties": {"file": {"const": "a.py"}}, "required": ["file"],
                   "additionalProperties": False},
    }
}  # fmt: skip


def responses() -> dict[str, Any]:
    return {"answer": shape(respond(text=ONLY))}


def responses_stream() -> dict[str, Any]:
    events = list(respond(text=ONLY, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    return {"kinds": kinds, "text": text, "last": shape(events[-1].response)}


def responses_items() -> dict[str, Any]:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Which file?"}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"town":"Köln"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    tool = {"type": "function", **WEATHER["function"]}
    return {
        "answer": shape(respond(input=items, instructions="Answer.", tools=[tool], store=False, text=ONLY))
    }


def responses_raw() -> dict[str, Any]:
    raw = CLIENT.responses.with_raw_response.create(model=MODEL, input="Which file?", max_output_tokens=8)
    return {"status": raw.status_code, **headers(raw.headers)}


async def responses_async() -> dict[str, Any]:
    async with asynchronous() as client:
        stream = await client.responses.create(
            model=MODEL, input="Which file?", max_output_tokens=32, text=ONLY, stream=True
        )
        return {"kinds": [event.type async for event in stream if not event.type.endswith(".delta")]}


def expired() -> None:
    CLIENT.with_options(timeout=0.001).chat.completions.create(model=MODEL, messages=QUESTION)


CASES = {
    "models: list": models_list,
    "chat": chat_sync,
    "chat: stream": chat_stream,
    "chat: stream with usage": chat_stream_usage,
    "chat: stream helper": chat_stream_helper,
    "chat: raw answer": chat_raw,
    "chat: raw stream": chat_raw_stream,
    "chat: options": chat_options,
    "chat: logprobs": chat_logprobs,
    "chat: tools": chat_tools,
    "chat: tools, stream": chat_tools_stream,
    "chat: named tool": chat_tool_named,
    "chat: tool results": chat_tool_turn,
    "chat: parsed answer": chat_parse,
    "chat: large prompt": chat_large,
    "chat: left in the middle": chat_stopped_early,
    "chat: async": chat_async,
    "chat: async stream": chat_async_stream,
    "chat: async, eight at once": chat_async_many,
    "chat: async, cancelled": chat_async_cancelled,
    "completions": completions,
    "completions: stream": completions_stream,
    "completions: options": completions_options,
    "completions: tokens": completions_of_tokens,
    "responses": responses,
    "responses: stream": responses_stream,
    "responses: items": responses_items,
    "responses: raw answer": responses_raw,
    "responses: async stream": responses_async,
}
REFUSED = {
    "error: unknown model": lambda: chat(model="nobody"),
    "error: value out of range": lambda: chat(temperature=99),
    "error: wrong type": lambda: chat(messages="no list"),
    "error: missing field": lambda: CLIENT.post("/chat/completions", cast_to=object, body={"model": MODEL}),
    "error: not JSON": lambda: CLIENT.post("/chat/completions", cast_to=object, content=b"{not json"),
    "error: prompt too long": lambda: chat(messages=[{"role": "user", "content": "word " * 9000}]),
    "error: image to a text model": lambda: chat(
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            }
        ]
    ),
    "error: stream of a bad call": lambda: list(chat(stream=True, top_logprobs=-3)),
    "error: models: retrieve": lambda: CLIENT.models.retrieve(MODEL),
    "error: responses: unknown id": lambda: CLIENT.responses.retrieve("resp_unknown"),
    "error: responses: unknown previous": lambda: respond(previous_response_id="resp_unknown"),
    "error: responses: unknown model": lambda: respond(model="nobody"),
    "error: completions: unknown model": lambda: complete(model="nobody"),
    "error: embeddings of a text model": lambda: CLIENT.embeddings.create(model=MODEL, input="x"),
    "error: moderations": lambda: CLIENT.moderations.create(input="x"),
    "error: files": lambda: CLIENT.files.list(),
    "error: images": lambda: CLIENT.images.generate(prompt="x", model=MODEL),
    "error: speech": lambda: CLIENT.audio.speech.create(input="x", model=MODEL, voice="alloy"),
    "error: transcription": lambda: CLIENT.audio.transcriptions.create(file=("a.wav", b"RIFF"), model=MODEL),
    "error: batches": lambda: CLIENT.batches.list(),
    "error: timeout of the client": expired,
}

if __name__ == "__main__":
    case_log.run(CASES, REFUSED)
