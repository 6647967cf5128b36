"""Requests of OpenAI's Responses API as vLLM turns them into chat requests.

Follows vLLM 0.32 (`entrypoints/openai/responses/protocol.py` and `utils.py`, `tool_parsers/utils.py`,
`renderers/online_renderer.py`): instructions become a system message, reasoning, text and calls that stand
together one assistant message. What goes before by `previous_response_id` are the earlier items without
system messages, and of the answers only their texts: the engine forgets their reasoning and their calls.
What it would refuse raises `RejectedByEngine`; what we do not follow raises `Unmappable`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.normalise import Message
from engine_bridge.mapping.prompts import ChatPrompt, ConvertedPrompt

_LISTED_ROLES = ("user", "system", "developer")
_STATUSES = ("in_progress", "completed", "incomplete")
_OPEN_STATUSES = ("in_progress", "incomplete")
_EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
_FOREIGN_PARTS = frozenset(("input_image", "input_file", "input_audio"))
"""Parts that the list may have and no template writes as they are."""

_NOT_SEEN = frozenset(("type", "id", "status", "phase"))
"""Fields of a message that no template sees."""

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
_FOREIGN = {
    "prompt": "the request names a stored prompt",
    "previous_input_messages": "the request brings messages of another form",
}


class Item(msgspec.Struct, frozen=True):
    """An item of the client's list, as the chat message that it becomes.

    `joins` says that it is a part of the same message as the item before it.
    """

    message: Message
    joins: bool = False


class ResponsesPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What of a Responses request decides its prompt; `continues`: the last message is to be gone on with."""

    items: tuple[Item, ...]
    instructions: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    effort: str | None = None
    continues: bool = False

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "ResponsesPrompt":
        """Read a parsed request body, without what goes before it. Raises `Unmappable`."""
        for field, reason in _FOREIGN.items():
            if body.get(field) is not None:
                raise Unmappable(reason)
        instructions = body.get("instructions")
        if not isinstance(instructions, str | None):
            raise RejectedByEngine("instructions must be text")
        kwargs = body.get("chat_template_kwargs")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise RejectedByEngine("chat_template_kwargs must be an object")
        reasoning = body.get("reasoning")
        if not isinstance(reasoning, dict | None):
            raise RejectedByEngine("reasoning must be an object")
        effort = (reasoning or {}).get("effort")
        if effort is not None and effort not in _EFFORTS:
            raise RejectedByEngine("reasoning.effort is not a known level")
        given = body.get("input")
        return cls(
            items=_items(given),
            instructions=instructions or "",
            tools=_tools(body.get("tools", [])),
            tool_choice=body.get("tool_choice"),
            chat_template_kwargs=kwargs,
            effort=effort,
            continues=isinstance(given, list) and bool(given) and _is_open(given[-1]),
        )

    def following(self, earlier: Sequence[Item]) -> "ResponsesPrompt":
        """The same request behind what the engine remembers of the conversation before it."""
        return msgspec.structs.replace(self, items=(*earlier, *self.items))

    def converted(self) -> ConvertedPrompt:
        """The chat request. Raises `RejectedByEngine` if there is no message.

        The tokens of a message of several items belong to the last of them: the others are empty before it.
        """
        messages: list[Message] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        num_system = len(messages)
        counts = []
        for item in self.items:
            if item.joins:
                messages[-1] = _joined(messages[-1], item.message)
            else:
                messages.append(item.message)
            counts.append(len(messages))
        if not messages:
            raise RejectedByEngine("no message is left of the list")
        for at, (_, following) in enumerate(pairwise(self.items)):
            counts[at] -= following.joins
        prompt = ChatPrompt(
            messages=messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.effort,
            add_generation_prompt=not self.continues,
            continue_final_message=self.continues,
        )
        return ConvertedPrompt(prompt, num_system, tuple(counts))


def remembered(items: Sequence[Item], answer_texts: Sequence[str]) -> tuple[Item, ...]:
    """What the engine puts before a request that follows this one: its items, and the texts of its answer."""
    texts = [Item({"role": "assistant", "content": text}) for text in answer_texts]
    return (*(item for item in items if item.message["role"] != "system"), *texts)


def groups(items: Sequence[Item]) -> Iterator[tuple[int, Message]]:
    """The chat messages that items become, each with the number of its first item."""
    begin, message = 0, None
    for at, item in enumerate(items):
        if item.joins and message is not None:
            message = _joined(message, item.message)
            continue
        if message is not None:
            yield begin, message
        begin, message = at, item.message
    if message is not None:
        yield begin, message


def custom_arguments(given: str) -> str:
    """The free text for a custom tool, as the arguments of the function that stands in for it."""
    return json.dumps({"input": given}, ensure_ascii=False)


def flat_name(namespace: str, name: str) -> str:
    """A function's name among those of all namespaces."""
    return f"{namespace}__{name}" if namespace else name


def _joined(message: Message, part: Message) -> Message:
    calls = [*message.get("tool_calls", ()), *part.get("tool_calls", ())]
    return {**message, **part, **({"tool_calls": calls} if calls else {})}


def _items(given: Any) -> tuple[Item, ...]:
    if isinstance(given, str):
        return (Item({"role": "user", "content": given}),)
    if not isinstance(given, list):
        raise RejectedByEngine("input must be text or a list")
    items: list[Item] = []
    whole: Message = {}
    for each in given:
        part = _message(each)
        joins = whole.get("role") == part["role"] == "assistant" and (
            "tool_calls" in part or all(field not in whole for field in part if field != "role")
        )
        whole = _joined(whole, part) if joins else part
        items.append(Item(part, joins))
    return tuple(items)


def _message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise RejectedByEngine("an item of the input is no object")
    match item.get("type", "message"):
        case "message":
            return _text_message(item)
        case "function_call":
            name = flat_name(_optional(item, "namespace"), _text(item, "name"))
            return _call(item, name, _text(item, "arguments"))
        case "custom_tool_call":
            return _call(item, _text(item, "name"), custom_arguments(_text(item, "input")))
        case "function_call_output" | "custom_tool_call_output" as kind:
            return _output(item, kind)
        case "reasoning":
            return {"role": "assistant", "reasoning": _reasoning(item)}
        case kind:
            raise RejectedByEngine(f"an item of type {kind!r} is not supported")


def _text_message(item: Message) -> Message:
    role, content = item.get("role"), item.get("content")
    if role in _LISTED_ROLES:
        _check_content(content)
        return {field: value for field, value in item.items() if field not in _NOT_SEEN}
    if role != "assistant":
        raise RejectedByEngine("a message has no known role")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not content:
        raise Unmappable("an assistant message has no text")
    kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
    first = content[0]
    if kinds <= {"output_text", "refusal"}:
        closed = "type" not in item and "id" not in item
        if closed or item.get("status", "completed") not in _STATUSES or first["type"] == "refusal":
            raise RejectedByEngine("an assistant message is not as the engine writes them")
    else:
        _check_content(content)
    return {"role": role, "content": _text(first, "text")}


def _check_content(content: Any) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RejectedByEngine("a content is neither text nor a list")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_text":
            _text(part, "text")
        elif kind not in _FOREIGN_PARTS:
            raise RejectedByEngine("a content part has no known type")


def _call(item: Message, name: str, arguments: str) -> Message:
    if item.get("status") not in (None, *_STATUSES):
        raise RejectedByEngine("a call has no known status")
    function = {"name": name, "arguments": arguments}
    call = {"id": _text(item, "call_id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _output(item: Message, kind: str) -> Message:
    output = item.get("output")
    _check_content(output)
    if kind == "custom_tool_call_output" and not isinstance(output, str):
        raise Unmappable("the output of a custom tool is no plain text")
    call_id = item.get("call_id")
    if not isinstance(call_id, str | None):
        raise RejectedByEngine("call_id is not text")
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def _reasoning(item: Message) -> str:
    if item.get("encrypted_content"):
        raise RejectedByEngine("the reasoning is encrypted")
    content, summary = item.get("content"), item.get("summary")
    if not isinstance(summary, list) or not isinstance(content, list | None):
        raise RejectedByEngine("reasoning is not as the engine writes it")
    if not isinstance(item.get("id", ""), str) or item.get("status") not in (None, *_STATUSES):
        raise RejectedByEngine("reasoning is not as the engine writes it")
    texts = [_text(part, "text") for part in (*(content or ()), *summary) if isinstance(part, dict)]
    return texts[0] if texts else ""


def _is_open(item: Message) -> bool:
    return item.get("type", "message") in ("message", "reasoning") and item.get("status") in _OPEN_STATUSES


def _tools(given: Any) -> list[dict[str, Any]] | None:
    if not isinstance(given, list):
        raise RejectedByEngine("tools must be a list")
    return [tool for each in given for tool in _functions(each)] if given else None


def _functions(tool: Any, namespace: str = "") -> Iterator[dict[str, Any]]:
    """What the model is shown of a tool: functions; other kinds are the engine's own affair."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise RejectedByEngine("a tool has no type")
    if kind == "namespace" and not namespace:
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise RejectedByEngine("a namespace has no list of tools")
        for each in inner:
            yield from _functions(each, _text(tool, "name"))
    elif kind == "function":
        fields = ("description", "parameters", "strict", "defer_loading")
        function = {field: tool[field] for field in fields if tool.get(field) is not None}
        yield {"type": kind, "function": {"name": flat_name(namespace, _text(tool, "name")), **function}}
    elif kind == "custom" and not namespace:
        form = tool.get("format")
        if isinstance(form, dict) and form.get("type") == "grammar":
            raise RejectedByEngine("a custom tool has a grammar")
        described = {"description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}
        yield {"type": "function", "function": {"name": _text(tool, "name"), **described}}


def _text(holder: Mapping[str, Any], field: str) -> str:
    value = holder.get(field)
    if not isinstance(value, str):
        raise RejectedByEngine(f"{field} is not text")
    return value


def _optional(holder: Mapping[str, Any], field: str) -> str:
    return _text(holder, field) if holder.get(field) is not None else ""
