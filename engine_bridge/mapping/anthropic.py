"""Requests of Anthropic's Messages API as vLLM turns them into chat requests.

Follows vLLM 0.32 (`entrypoints/anthropic/protocol.py` and `serving.py`), which serves `/v1/messages` by
converting it: system blocks become one system message, tool results messages of their own, thinking becomes
reasoning. Where that conversion depends on the chat template, it is finished only when the template is known.
What it would refuse raises `RejectedByEngine`; changes of tools in mid-conversation raise `Unmappable`.
"""

import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Literal

import msgspec

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.normalise import BILLING_HEADER, Message
from engine_bridge.mapping.prompts import ChatPrompt, ConvertedPrompt

DisabledEffort = Literal["none", "low"]
"""What a switched off thinking becomes: a template that cannot do without is asked for little of it."""

_ROLES = ("user", "assistant", "system")
_BLOCKS = frozenset(
    ("text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking")
)
_TOOL_CHANGES = ("tool_addition", "tool_removal")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = ("low", "medium", "high", "xhigh", "max")


class Turn(msgspec.Struct, frozen=True):
    """A message of the client, and the chat messages that it becomes: none, one or several."""

    role: str
    messages: list[Message]


class MessagesPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What of a Messages request decides its prompt. `system` are the leading system prompt's texts."""

    system: tuple[str, ...]
    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    effort: str | None = None
    thinking_off: bool = False

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "MessagesPrompt":
        """Read a parsed request body. Raises `Unmappable`."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise RejectedByEngine("messages must be a list")
        kwargs = body.get("chat_template_kwargs")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise RejectedByEngine("chat_template_kwargs must be an object")
        thinking = _optional_object(body, "thinking").get("type")
        if thinking not in (None, "enabled", "disabled", "adaptive"):
            raise RejectedByEngine("thinking has no known type")
        effort = _optional_object(body, "output_config").get("effort")
        if effort is not None and effort not in EFFORTS:
            raise RejectedByEngine("output_config.effort is not a known level")
        return cls(
            system=tuple(_system(body.get("system"))),
            turns=tuple(_turn(message) for message in messages),
            tools=_tools(body.get("tools")),
            tool_choice=_tool_choice(body),
            chat_template_kwargs=kwargs,
            effort=effort,
            thinking_off=thinking == "disabled",
        )

    def converted(self, merges_system: bool, disabled_effort: DisabledEffort) -> ConvertedPrompt:
        """The chat request, for a template that wants all system messages in front (`merges_system`) or not.

        Raises `RejectedByEngine` if no message is left.
        """
        moved = [bool(turn.messages) and merges_system and turn.role == "system" for turn in self.turns]
        inline = [turn.messages[0] for turn, gone in zip(self.turns, moved, strict=True) if gone]
        parts = [*self.system, *(message["content"] for message in inline)]
        messages: list[Message] = [{"role": "system", "content": "".join(parts)}] if parts else []
        num_system = len(messages)
        kept = [[] if gone else turn.messages for turn, gone in zip(self.turns, moved, strict=True)]
        for each in kept:
            messages += each
        if not messages:
            raise RejectedByEngine("no message is left of the list")
        prompt = ChatPrompt(
            messages=messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=disabled_effort if self.thinking_off else self.effort,
        )
        counts = tuple(accumulate(map(len, kept), initial=num_system))[1:]
        last_moved = max((at for at, gone in enumerate(moved) if gone), default=-1)
        return ConvertedPrompt(prompt, num_system, counts, last_moved)


def _system(given: Any) -> list[str]:
    if given is None:
        return []
    if isinstance(given, str):
        return [given] if given else []
    return _texts(_blocks(given))


def _texts(blocks: list[Message]) -> list[str]:
    """Texts of system blocks, without the line that Claude Code signs its requests with."""
    texts = [block["text"] for block in blocks if block["type"] == "text" and block.get("text")]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _blocks(given: Any) -> list[Message]:
    if not isinstance(given, list):
        raise RejectedByEngine("a content is neither text nor a list of blocks")
    for block in given:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in _TOOL_CHANGES:
            raise Unmappable(f"a block of type {kind!r} changes the tools")
        if kind not in _BLOCKS:
            raise RejectedByEngine("a content block has no known type")
        for field in ("text", "id", "tool_use_id", "name", "thinking"):
            if not isinstance(block.get(field), str | None):
                raise RejectedByEngine(f"{field} of a content block is not text")
        for field in ("input", "source"):
            if not isinstance(block.get(field), dict | None):
                raise RejectedByEngine(f"{field} of a content block is not an object")
        _check_result(block.get("content"))
    return given


def _check_result(content: Any) -> None:
    if isinstance(content, str | None):
        return
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise RejectedByEngine("the content of a block is neither text nor a list of objects")


def _turn(message: Any) -> Turn:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise RejectedByEngine("a message has no known role")
    content = message.get("content")
    blocks = None if isinstance(content, str) else _blocks(content)
    if role == "system":
        return Turn(role, _inline_system([{"type": "text", "text": content}] if blocks is None else blocks))
    if blocks is None:
        return Turn(role, [{"role": role, "content": content}])
    return Turn(role, _converted_blocks(role, blocks))


def _inline_system(blocks: list[Message]) -> list[Message]:
    text = "".join(_texts(blocks))
    return [{"role": "system", "content": text}] if text else []


def _converted_blocks(role: str, blocks: list[Message]) -> list[Message]:
    before: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    reasoning: list[str] = []
    for block in blocks:
        match block["type"]:
            case "text":
                if block.get("text"):
                    parts.append({"type": "text", "text": block["text"]})
            case "image":
                if block.get("source"):
                    parts.append(_image(block["source"]))
            case "thinking":
                if block.get("thinking") is not None:
                    reasoning.append(block["thinking"])
            case "tool_use":
                calls.append(_tool_call(block))
            case "tool_result" if role == "user":
                before += _tool_result(block)
            case "tool_result":
                given = block.get("content")
                parts.append({"type": "text", "text": f"Tool result: {str(given) if given else ''}"})
    message: Message = {"role": role}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if alone else parts
    return before if role == "user" and "content" not in message else [*before, message]


def _tool_call(block: Message) -> Message:
    if not block.get("id"):
        raise Unmappable("a tool_use block has no id: the engine makes one of the time of day")
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _tool_result(block: Message) -> list[Message]:
    content = block.get("content")
    items = content if isinstance(content, list) else []
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise RejectedByEngine("a text in a tool_result block is not text")
    answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    text = content if isinstance(content, str) else "\n".join(texts)
    messages: list[Message] = [{**answer, "content": text}]
    images = [_image(item.get("source") or {}) for item in items if item.get("type") == "image"]
    images = [image for image in images if image["image_url"]["url"]]
    if images:
        messages.append({"role": "user", "content": images})
    named = [
        item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"
    ]
    references = [{"type": "tool_reference", "name": name} for name in named if name]
    if references:
        messages.append({**answer, "content": references})
    return messages


def _image(source: Any) -> Message:
    if not isinstance(source, dict):
        raise RejectedByEngine("the source of an image is not an object")
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tools(given: Any) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    if not isinstance(given, list):
        raise RejectedByEngine("tools must be a list")
    return [_tool(tool) for tool in given]


def _tool(tool: Any) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise RejectedByEngine("a tool has no input_schema")
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    for field in ("strict", "defer_loading"):
        function[field] = tool.get(field)
    return {"type": "function", "function": function}


def _tool_choice(body: Mapping[str, Any]) -> Any:
    choice = _optional_object(body, "tool_choice")
    if not choice:
        return "auto" if body.get("tools") is not None else None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") not in _TOOL_CHOICES:
        raise RejectedByEngine("tool_choice has no known type")
    return _TOOL_CHOICES[choice["type"]]


def _optional_object(body: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = body.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RejectedByEngine(f"{field} must be an object")
    return value
