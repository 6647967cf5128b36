"""A request of any of the three APIs as the scripted model reads it: roles, texts, tool calls, tools."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Said(msgspec.Struct, frozen=True):
    """One message. `role` is system, user, assistant or tool: a tool's result is `tool` in every API."""

    role: str
    text: str
    num_calls: int = 0


class Tool(msgspec.Struct, frozen=True):
    """A tool on offer. `schema` describes its arguments; None for one that takes free text.

    `namespace` is that of a Responses tool, `kind` its type there: `function`, `custom`, `local_shell`.
    """

    name: str
    schema: dict[str, Any] | None
    description: str = ""
    namespace: str = ""
    kind: str = "function"


class Asked(msgspec.Struct, frozen=True):
    """What a request asks."""

    path: str
    said: Sequence[Said]
    tools: Sequence[Tool]
    body: Mapping[str, Any]

    @property
    def system(self) -> str:
        """All that was said as system or developer."""
        return "\n".join(each.text for each in self.said if each.role == "system")

    @property
    def last(self) -> Said:
        """The last message, whoever said it."""
        return self.said[-1] if self.said else Said("user", "")

    @property
    def last_user(self) -> str:
        """What the user said last; several messages in a row are one."""
        texts: list[str] = []
        for each in reversed(self.said):
            if each.role == "user":
                texts.append(each.text)
            elif texts:
                break
        return "\n".join(reversed(texts))


def read_request(path: str, body: Mapping[str, Any]) -> Asked:
    """A parsed body by the API of its path. Whatever is malformed reads as empty."""
    readers = {CHAT: (_chat, _chat_tools), RESPONSES: (_responses, _responses_tools)}
    said, tools = readers.get(path, (_messages, _messages_tools))
    return Asked(path, list(said(body)), list(tools(body.get("tools"))), body)


def text_of(content: object) -> str:
    """Text of a content, whatever its form."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = []
    for part in content:
        if isinstance(part, dict):
            inner = part.get("text", part.get("content", part.get("thinking")))
            texts.append(inner if isinstance(inner, str) else text_of(inner))
        elif isinstance(part, str):
            texts.append(part)
    return "\n".join(text for text in texts if text)


def _listed(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _role(role: object) -> str:
    return "system" if role == "developer" else "tool" if role == "function" else str(role)


def _chat(body: Mapping[str, Any]) -> Iterator[Said]:
    for message in _listed(body.get("messages")):
        calls = _listed(message.get("tool_calls"))
        yield Said(_role(message.get("role")), text_of(message.get("content")), len(calls))


def _chat_tools(given: object) -> Iterator[Tool]:
    for tool in _listed(given):
        function = tool.get("function")
        if isinstance(function, dict):
            schema = function.get("parameters") or {}
            yield Tool(str(function.get("name")), schema, str(function.get("description", "")))


def _responses(body: Mapping[str, Any]) -> Iterator[Said]:
    if body.get("instructions"):
        yield Said("system", str(body["instructions"]))
    given = body.get("input")
    if isinstance(given, str):
        yield Said("user", given)
    for item in _listed(given):
        kind = item.get("type", "message")
        if kind == "message":
            yield Said(_role(item.get("role")), text_of(item.get("content")))
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            yield Said("assistant", "", 1)
        elif kind.endswith("_output"):
            output = item.get("output")
            yield Said("tool", text_of(output) or json.dumps(output))
        elif kind in ("compaction", "compaction_summary", "context_compaction"):
            yield Said("user", str(item.get("encrypted_content", "")))


def _responses_tools(given: object, namespace: str = "") -> Iterator[Tool]:
    for tool in _listed(given):
        kind, name = str(tool.get("type")), str(tool.get("name", ""))
        if kind == "namespace":
            yield from _responses_tools(tool.get("tools"), name)
        elif kind in ("function", "custom", "local_shell"):
            schema = tool.get("parameters") or {} if kind == "function" else None
            yield Tool(name or kind, schema, str(tool.get("description", "")), namespace, kind)


def _messages(body: Mapping[str, Any]) -> Iterator[Said]:
    system = text_of(body.get("system"))
    if system:
        yield Said("system", system)
    for message in _listed(body.get("messages")):
        role, content = _role(message.get("role")), message.get("content")
        blocks = _listed(content)
        for block in blocks:
            if block.get("type") == "tool_result":
                yield Said("tool", text_of(block.get("content")))
        texts = [b for b in blocks if b.get("type") not in ("tool_result", "tool_use")]
        calls = sum(block.get("type") == "tool_use" for block in blocks)
        text = content if isinstance(content, str) else text_of(texts)
        if text or calls:
            yield Said(role, text, calls)


def _messages_tools(given: object) -> Iterator[Tool]:
    for tool in _listed(given):
        if isinstance(tool.get("input_schema"), dict):
            yield Tool(str(tool.get("name")), tool["input_schema"], str(tool.get("description", "")))
