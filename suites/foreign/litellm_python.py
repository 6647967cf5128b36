"""LiteLLM's SDK, which speaks to many providers: here to an OpenAI-compatible one of one's own."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from typing import Any

import case_log
import litellm
from case_log import shape

ARGUMENTS = case_log.arguments()
OPTIONS: dict[str, Any] = {"api_key": "any", "timeout": 60, "num_retries": 0, "max_retries": 0}
VLLM = {"model": f"hosted_vllm/{ARGUMENTS.model}", "api_base": f"{ARGUMENTS.base_url}/v1", **OPTIONS}
OPENAI = {**VLLM, "model": f"openai/{ARGUMENTS.model}"}
TEXT = {**VLLM, "model": f"text-completion-openai/{ARGUMENTS.model}"}
ANTHROPIC = {**OPTIONS, "model": f"anthropic/{ARGUMENTS.model}", "api_base": ARGUMENTS.base_url}
QUESTION = [{"role": "user", "content": "Which file holds the parser?"}]
SHORT: dict[str, Any] = {"messages": QUESTION, "max_tokens": 16, "temperature": 0}
CHOICE = {"structured_outputs": {"choice": ["naïve 😀 日本語"]}}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def chat(provider: dict[str, Any], **more: Any) -> Any:
    return litellm.completion(**{**provider, **SHORT, **more})


def streamed(provider: dict[str, Any], **more: Any) -> dict[str, Any]:
    chunks = list(chat(provider, stream=True, **more))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    return {"text": text, "reason": whole.choices[0].finish_reason}  # type: ignore[union-attr]


def tools() -> dict[str, Any]:
    extra = {"structured_outputs": {"choice": [CALLED]}}
    return {"answer": shape(chat(VLLM, tools=[WEATHER], extra_body=extra, max_tokens=64))}


def text_completion() -> dict[str, Any]:
    answer = litellm.text_completion(**TEXT, prompt="def parse(", max_tokens=8, temperature=0)
    return {"answer": shape(answer)}


def responses() -> dict[str, Any]:
    answer = litellm.responses(**OPENAI, input="Which file?", max_output_tokens=16, temperature=0)
    return {"answer": shape(answer)}


async def chat_async() -> dict[str, Any]:
    return {"answer": shape(await litellm.acompletion(**VLLM, **SHORT, extra_body=CHOICE))}


async def chat_async_stream() -> dict[str, Any]:
    stream = await litellm.acompletion(**VLLM, **SHORT, extra_body=CHOICE, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return {"text": "".join(texts)}


async def anthropic_messages() -> dict[str, Any]:
    return {"answer": shape(await litellm.anthropic_messages(**ANTHROPIC, **SHORT))}


CASES = {
    "vllm: chat": lambda: {"answer": shape(chat(VLLM, extra_body=CHOICE))},
    "vllm: stream": lambda: streamed(VLLM, extra_body=CHOICE),
    "vllm: tools": tools,
    "vllm: async": chat_async,
    "vllm: async stream": chat_async_stream,
    "openai: chat": lambda: {"answer": shape(chat(OPENAI, extra_body=CHOICE))},
    "openai: stream": lambda: streamed(OPENAI, extra_body=CHOICE),
    "openai: text completion": text_completion,
    "openai: responses": responses,
    "anthropic: chat": lambda: {"answer": shape(chat(ANTHROPIC))},
    "anthropic: stream": lambda: streamed(ANTHROPIC),
    "anthropic: messages": anthropic_messages,
}
REFUSED = {
    "error: unknown model": lambda: chat({**VLLM, "model": "hosted_vllm/nobody"}),
    "error: value out of range": lambda: chat(VLLM, temperature=99),
    "error: prompt too long": lambda: chat(VLLM, messages=[{"role": "user", "content": "word " * 9000}]),
    "error: embeddings of a text model": lambda: litellm.embedding(**VLLM, input=["x"]),
    "error: anthropic: unknown model": lambda: chat({**ANTHROPIC, "model": "anthropic/nobody"}),
}

if __name__ == "__main__":
    litellm.suppress_debug_info = True
    case_log.run(CASES, REFUSED)
