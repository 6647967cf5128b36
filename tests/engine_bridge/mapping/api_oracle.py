"""Runs in the engine's environment: reads requests of `/v1/messages`, `/v1/responses` and `/v1/completions`,
prints what vLLM's own code makes of them.

One JSON object a line in (`api`, `body`, for all but completions `template`, for responses `earlier`, the
requests before it, each with the output items of its answer), one out (`ids`) or `{"error": ...}`.
"""

import asyncio
import json
import sys
import types
from typing import Any

from engine_oracle import MODEL
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter
from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt, prompt_to_seq
from vllm.renderers.params import merge_kwargs


def rendered(
    tokenizer: Any,
    request: ChatCompletionRequest | ResponsesRequest,
    template: str,
    tools: Any,
    messages: Any,
) -> list[int]:
    params = request.build_chat_params(template, "auto").with_defaults(
        merge_kwargs(None, {"tools": tools, "tokenize": False})
    )
    form = resolve_chat_template_content_format(
        chat_template=template, tools=tools, given_format="auto", tokenizer=tokenizer, model_config=MODEL
    )
    conversation, _, _ = parse_chat_messages(messages, MODEL, form)
    text = safe_apply_chat_template(MODEL, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
    return list(tokenizer.encode(text, add_special_tokens=False))


def rendered_chat(tokenizer: Any, request: ChatCompletionRequest, template: str) -> list[int]:
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return rendered(tokenizer, request, template, tools, request.messages)


def disabled_effort(tokenizer: Any, template: str) -> str:
    """The engine's own probe, with a renderer that renders as above."""

    async def render_chat(request: ChatCompletionRequest) -> Any:
        return None, (rendered_chat(tokenizer, request, template),)

    probing = types.SimpleNamespace(
        online_renderer=types.SimpleNamespace(render_chat=render_chat),
        _extract_prompt_components=lambda ids: types.SimpleNamespace(token_ids=ids, text=None),
    )
    probing._render_probe_prompt = types.MethodType(AnthropicServingMessages._render_probe_prompt, probing)
    return asyncio.run(AnthropicServingMessages._probe_disabled_thinking_effort(probing))


def messages(tokenizer: Any, job: dict[str, Any]) -> list[list[int]]:
    template = job["template"] or tokenizer.chat_template
    request = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest(**job["body"]),
        merge_inline_system=AnthropicServingMessages._detect_merge_inline_system(template),
        disabled_thinking_effort=disabled_effort(tokenizer, template),
    )
    return [rendered_chat(tokenizer, request, template)]


def responses(tokenizer: Any, job: dict[str, Any]) -> list[list[int]]:
    before: dict[str, Any] = {}
    for body, output in job["earlier"]:
        earlier = ResponsesRequest(**body)
        messages = construct_input_messages(
            request_instructions=earlier.instructions, request_input=earlier.input, **before
        )
        items = TypeAdapter(list[ResponseOutputItem]).validate_python(output)
        before = {"prev_msg": messages, "prev_response_output": items}
    request = ResponsesRequest(**job["body"])
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input, **before
    )
    template = job["template"] or tokenizer.chat_template
    return [rendered(tokenizer, request, template, tools, messages)]


def completions(tokenizer: Any, job: dict[str, Any]) -> list[list[int]]:
    request = CompletionRequest(**job["body"])
    params = request.build_tok_params(MODEL)
    prompts = []
    for prompt in map(parse_dec_only_prompt, prompt_to_seq(request.prompt)):
        if "prompt_token_ids" not in prompt:
            prompt = {
                "prompt_token_ids": tokenizer(prompt["prompt"], **params.get_encode_kwargs())["input_ids"]
            }
        prompts.append(list(params.apply_post_tokenization(None, prompt)["prompt_token_ids"]))
    return prompts


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
    make = {"messages": messages, "responses": responses, "completions": completions}
    for line in sys.stdin:
        job = json.loads(line)
        try:
            out = {"ids": make[job["api"]](tokenizer, job)}
        except Exception as error:  # noqa: BLE001 - every refusal is an answer
            out = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
