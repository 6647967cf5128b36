"""Runs in the engine's environment: reads chat requests, prints the prompts that vLLM's own code makes of
them.

One JSON object a line in (`body`, `template`, `defaults`), one out (`text`, `ids`) or `{"error": ...}`.
"""

import json
import sys
import types
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
from vllm.renderers.params import merge_kwargs

MODEL = types.SimpleNamespace(
    enable_prompt_embeds=False,
    multimodal_config=None,
    revision=None,
    code_revision=None,
    tokenizer_revision=None,
    trust_remote_code=False,
    model="model",
    tokenizer="tokenizer",
    max_model_len=1_000_000,
)


def answer(tokenizer: Any, job: dict[str, Any]) -> dict[str, Any]:
    request = ChatCompletionRequest(**job["body"])
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    template = job["template"] or tokenizer.chat_template
    params = request.build_chat_params(template, "auto").with_defaults(
        merge_kwargs(job["defaults"], {"tools": tools, "tokenize": False})
    )
    form = resolve_chat_template_content_format(
        chat_template=template, tools=tools, given_format="auto", tokenizer=tokenizer, model_config=MODEL
    )
    conversation, _, _ = parse_chat_messages(request.messages, MODEL, form)
    text = safe_apply_chat_template(MODEL, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
    ids = tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    return {"text": text, "ids": ids, "format": form}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
    for line in sys.stdin:
        try:
            out = answer(tokenizer, json.loads(line))
        except Exception as error:  # noqa: BLE001 - every refusal is an answer
            out = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
