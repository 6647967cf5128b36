"""A conversation of our own plain agents in the form of each API, and the answer read back from it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from harnesses.conversation import CHAT, MESSAGES, RESPONSES

TOOL_NAMES = {"shell": "command", "read_file": "path", "task": "prompt"}
"""Tools of the plain agents, with their one argument."""

Echo = Literal["verbatim", "reserialised", "bare"]
"""How an agent sends its model's answers back: as they came, with arguments as another program writes JSON,
or without the text beside tool calls."""


class Use(msgspec.Struct, frozen=True):
    """A tool call: `arguments` as the model wrote them."""

    call_id: str
    name: str
    arguments: str

    @property
    def value(self) -> str:
        """The one argument."""
        told = json.loads(self.arguments)
        return str(told.get(TOOL_NAMES.get(self.name, ""), ""))


class Message(msgspec.Struct, frozen=True):
    """A message; `result_of` is the call whose result it is, for a tool's."""

    role: str
    text: str
    uses: tuple[Use, ...] = ()
    result_of: str = ""


def request_body(
    path: str, model: str, messages: Sequence[Message], tools: Sequence[str], echo: Echo
) -> dict[str, Any]:
    """A request that is not streamed."""
    writers = {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages}
    return {"model": model, **writers[path](messages, tools, echo)}


def read_answer(path: str, answer: Mapping[str, Any]) -> Message:
    """The assistant's message of an answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        uses = [Use(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]
        return Message("assistant", message.get("content") or "", tuple(uses))
    if path == RESPONSES:
        texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        uses = [Use(c["call_id"], c["name"], c["arguments"]) for c in calls]
        return Message("assistant", "".join(texts), tuple(uses))
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    uses = [Use(c["id"], c["name"], json.dumps(c["input"], ensure_ascii=False)) for c in calls]
    return Message("assistant", "".join(texts), tuple(uses))


def _schema(name: str) -> dict[str, Any]:
    argument = TOOL_NAMES[name]
    return {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}


def _arguments(use: Use, echo: Echo) -> str:
    return (
        use.arguments if echo == "verbatim" else json.dumps(json.loads(use.arguments), separators=(",", ":"))
    )


def _text(message: Message, echo: Echo) -> str:
    return "" if echo == "bare" and message.uses else message.text


def _chat(messages: Sequence[Message], tools: Sequence[str], echo: Echo) -> dict[str, Any]:
    listed = []
    for each in messages:
        written: dict[str, Any] = {"role": each.role, "content": _text(each, echo)}
        if each.uses:
            written["tool_calls"] = [
                {
                    "id": use.call_id,
                    "type": "function",
                    "function": {"name": use.name, "arguments": _arguments(use, echo)},
                }
                for use in each.uses
            ]
        if each.result_of:
            written["tool_call_id"] = each.result_of
        listed.append(written)
    functions = [{"name": n, "description": f"Use {n}.", "parameters": _schema(n)} for n in tools]
    offered = {"tools": [{"type": "function", "function": f} for f in functions]} if tools else {}
    return {"messages": listed, **offered}


def _responses(messages: Sequence[Message], tools: Sequence[str], echo: Echo) -> dict[str, Any]:
    head = [each.text for each in messages if each.role == "system"]
    items: list[dict[str, Any]] = []
    for each in messages:
        if each.role == "tool":
            items.append({"type": "function_call_output", "call_id": each.result_of, "output": each.text})
        elif each.role == "user":
            items.append({"role": "user", "content": [{"type": "input_text", "text": each.text}]})
        elif each.role == "assistant":
            text = _text(each, echo)
            part = {"type": "output_text", "text": text, "annotations": []}
            if text:
                items.append({"type": "message", "role": "assistant", "id": "msg_0", "content": [part]})
            for use in each.uses:
                call = {"call_id": use.call_id, "name": use.name, "arguments": _arguments(use, echo)}
                items.append({"type": "function_call", **call})
    offered = [{"type": "function", "name": n, "parameters": _schema(n), "strict": False} for n in tools]
    return {"instructions": "\n".join(head), "input": items, "store": False, "tools": offered}


def _messages(messages: Sequence[Message], tools: Sequence[str], echo: Echo) -> dict[str, Any]:
    head = [each.text for each in messages if each.role == "system"]
    turns: list[dict[str, Any]] = []
    for each in messages:
        if each.role == "system":
            continue
        role = "user" if each.role == "tool" else each.role
        text = _text(each, echo)
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        if each.role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": each.result_of, "content": each.text}]
        for use in each.uses:
            given = json.loads(use.arguments)
            blocks.append({"type": "tool_use", "id": use.call_id, "name": use.name, "input": given})
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    offered = [{"name": n, "description": f"Use {n}.", "input_schema": _schema(n)} for n in tools]
    system = {"system": "\n".join(head)} if head else {}
    return {"messages": turns, "max_tokens": 4096, **system, **({"tools": offered} if tools else {})}
