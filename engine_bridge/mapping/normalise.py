"""A client's messages as the engine hands them to its chat template.

Follows vLLM 0.32: its request model (`entrypoints/openai/chat_completion/protocol.py`: field order, dropped
fields), `renderers/chat_utils.py` (contents, tool calls) and `renderers/hf.py` (developer messages, keyword
arguments). Whatever that code would refuse raises `RejectedByEngine`; what it accepts but we do not follow,
such as images, raises `Unmappable`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from engine_bridge.errors import RejectedByEngine, Unmappable

ContentFormat = Literal["string", "openai"]
Message = dict[str, Any]

_TEXT_FIELD = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_KNOWN_PART_FIELDS = frozenset(
    [
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    ]
)
_MEDIA_FIELDS = frozenset(
    [
        "audio_embeds",
        "audio_url",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "prompt_embeds",
        "uuid",
        "video_embeds",
        "video_url",
    ]
)
_RESERVED_KWARGS = frozenset(
    [
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)
BILLING_HEADER = "x-anthropic-billing-header"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class Merged(msgspec.Struct, frozen=True):
    """One template message made of several client messages: their texts in order, each with its client
    index.
    """

    parts: tuple[tuple[int, str], ...]


def normalise_message(raw: Mapping[str, Any], content_format: ContentFormat) -> Message:
    """One message as the template sees it; shares strings with `raw` and is never modified later."""
    role = raw.get("role")
    if not isinstance(role, str):
        raise RejectedByEngine("a message has no role")
    message: Message = {"role": sys.intern(role), "content": _content(raw, role, content_format)}
    if role == "assistant":
        _add_assistant_fields(raw, message)
    elif role == "tool" and "tool_call_id" in raw:
        message["tool_call_id"] = _optional_text(raw, "tool_call_id")
    for field in ("name", "task"):
        if isinstance(raw.get(field), str):
            message[field] = raw[field]
    if role == "developer":
        if raw.get("tools") is not None:
            raise Unmappable("a developer message carries tools")
        message["tools"] = None
    return message


def _content(raw: Mapping[str, Any], role: str, content_format: ContentFormat) -> Any:
    content = raw.get("content")
    if isinstance(content, str):
        if role == "system" and content.startswith(BILLING_HEADER):
            content = content.partition("\n")[2]
            if not content:
                return "" if content_format == "string" else []
        if content_format == "string" or role == "tool":
            return content
        return [{"type": "text", "text": content}]
    if content is None:
        if "content" in raw and role not in ("assistant", "function"):
            raise RejectedByEngine(f"the content of a {role} message is null")
        return "" if content_format == "string" or role == "tool" else []
    if not isinstance(content, list):
        raise RejectedByEngine("the content of a message is neither text nor a list of parts")
    parts = [part for item in content if (part := _part(item, role)) is not None]
    if content_format == "openai" and role != "tool":
        return [{"type": "text", "text": text, **extra} for text, extra in parts]
    if content_format == "openai":
        return "\n".join(text for text, _ in parts)
    return "\n".join(text for text, _ in parts if text)


def _part(part: Any, role: str) -> tuple[str, dict[str, Any]] | None:
    """Text and unknown fields of one content part, None for a part that the engine skips."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise RejectedByEngine("a content part is neither text nor an object")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_FIELD or not _MEDIA_FIELDS.isdisjoint(part):
        raise Unmappable(f"a content part of type {kind!r} is not plain text")
    text = part.get(_TEXT_FIELD[kind])
    if not isinstance(text, str):
        raise Unmappable(f"a content part of type {kind!r} has no text")
    if role == "system" and kind == "text" and text.startswith(BILLING_HEADER):
        text = text.partition("\n")[2]
        if not text:
            return None
    return text, {field: value for field, value in part.items() if field not in _KNOWN_PART_FIELDS}


def _add_assistant_fields(raw: Mapping[str, Any], message: Message) -> None:
    calls = raw.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise RejectedByEngine("tool_calls is not a list")
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = raw.get("reasoning")
    if reasoning is None:
        reasoning = raw.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise Unmappable("reasoning is not text")
        message["reasoning"] = reasoning
        message["reasoning_content"] = reasoning


def _tool_call(call: Any) -> Message:
    if not isinstance(call, dict) or call.get("type") != "function":
        raise RejectedByEngine("only tool calls of type function are accepted")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise RejectedByEngine("a tool call lacks its id or its function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise RejectedByEngine("a tool call's name and arguments must be text")
    return {
        "id": call["id"],
        "function": {
            "arguments": _arguments(arguments),
            "name": name,
            **{field: value for field, value in function.items() if field not in ("arguments", "name")},
        },
        "type": "function",
        **{field: value for field, value in call.items() if field not in ("id", "function", "type")},
    }


def _arguments(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text) if text else {}
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _optional_text(raw: Mapping[str, Any], field: str) -> str | None:
    value = raw[field]
    if value is not None and not isinstance(value, str):
        raise RejectedByEngine(f"{field} is not text")
    return value


def merge_developer(conversation: Sequence[Message]) -> tuple[list[Message], list[int | Merged]]:
    """For a template without a developer role: developer becomes system, system messages merge at the front.

    Returns the messages with, for each, its client index or what it was merged from.
    """
    renamed = [
        {**{field: value for field, value in message.items() if field != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]
    systems = [index for index, message in enumerate(renamed) if message["role"] == "system"]
    if systems == [0]:
        return renamed, list(range(len(renamed)))
    texts = [(index, _joined(renamed[index]["content"])) for index in systems]
    parts = tuple((index, text) for index, text in texts if text)
    merged: Message = {"role": "system", "content": "\n\n".join(text for _, text in parts)}
    rest = [index for index, message in enumerate(renamed) if message["role"] != "system"]
    return [merged, *(renamed[index] for index in rest)], [Merged(parts or ((systems[0], ""),)), *rest]


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def normalise_tools(tools: Sequence[Any]) -> list[Message]:
    """Tool definitions as vLLM's request model writes them back: known fields only, in its order."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Message:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise RejectedByEngine("a tool is not a function definition")
    if not isinstance(function.get("name"), str):
        raise RejectedByEngine("a tool has no name")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise RejectedByEngine("a tool's description must be text and its parameters an object")
    dumped: Message = {"name": function["name"], "description": description, "parameters": parameters}
    defer = tool.get("defer_loading")
    inner_defer = function.get("defer_loading")
    for field, value in (("strict", function.get("strict")), ("defer_loading", _first(inner_defer, defer))):
        if not isinstance(value, bool | None):
            raise Unmappable(f"a tool's {field} is not a boolean")
        if value is not None:
            dumped[field] = value
    outer: Message = {"type": "function", "function": dumped}
    if defer is not None:
        outer["defer_loading"] = defer
    return outer


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def template_kwargs(
    *,
    request: Mapping[str, Any] | None,
    defaults: Mapping[str, Any],
    documents: list[dict[str, str]] | None,
    add_generation_prompt: bool,
    reasoning_effort: str | None,
    template_variables: frozenset[str],
) -> dict[str, Any]:
    """Keyword arguments that reach the template, besides messages and tools.

    A request's null and "auto" leave the server's default in place; names the template never reads are
    dropped.
    """
    asked = dict(request or {})
    clash = sorted(_RESERVED_KWARGS & asked.keys())
    if clash:
        raise Unmappable(f"chat_template_kwargs sets {clash[0]!r}")
    if reasoning_effort is not None and "enable_thinking" not in asked:
        asked["enable_thinking"] = reasoning_effort != "none"
    for field, value in (("documents", documents), ("reasoning_effort", reasoning_effort)):
        if value is not None:
            asked[field] = value
    merged = {**defaults, **{field: value for field, value in asked.items() if not _unset(value)}}
    kept = {field: value for field, value in merged.items() if field in template_variables}
    kept["documents"] = merged.get("documents")
    kept["add_generation_prompt"] = add_generation_prompt
    kept.pop("continue_final_message", None)
    return kept


def _unset(value: Any) -> bool:
    return value is None or value == "auto"


def open_final_message(message: Message, template_source: str) -> Message:
    """Copy of the last message whose text ends in a tag, for `continue_final_message`."""
    content = message.get("content")
    if content is None or "content" not in template_source:
        raise RejectedByEngine("continue_final_message needs a final message with content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_TAG}
    for index in range(len(content) - 1, -1, -1):
        if "text" in content[index]:
            tagged = {**content[index], "text": content[index]["text"] + _CONTINUE_TAG}
            return {**message, "content": [*content[:index], tagged, *content[index + 1 :]]}
    raise RejectedByEngine("continue_final_message found no text to continue")


def cut_at_tag(rendered: str) -> str:
    """Text up to where the final message's own text ends."""
    at = rendered.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise RejectedByEngine("the template dropped the end of the final message")
    if rendered.startswith(_CONTINUE_TAG, at):
        return rendered[:at]
    return rendered[:at].rstrip()
