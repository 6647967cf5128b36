"""An answer of Anthropic's Messages API, whole or from the events of its stream, as the tap meets it."""

import json
from typing import Any

from proxy.answer_facts import ChoiceFact, ToolCallFact, Usage

_KINDS = frozenset(
    (
        "message",
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    )
)
"""The `type` of every document that belongs to such an answer, an error's apart."""


class _Block:
    """A content block whose deltas are still coming in. `text` is also a tool's arguments, as JSON."""

    def __init__(self, kind: str, tool_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.tool_id = tool_id
        self.name = name
        self.text: list[str] = []


class MessagesAnswer:
    """One message, put together. `finished` when the API's own end of it has come."""

    def __init__(self) -> None:
        self.started = False
        self.finished = False
        self._response_id = ""
        self._model = ""
        self._kv_transfer_params: dict[str, Any] | None = None
        self._usage = Usage()
        self._blocks: dict[int, _Block] = {}
        self._stop_reason = ""

    @staticmethod
    def knows(document: Any) -> bool:
        """Whether a document belongs to such an answer."""
        return isinstance(document, dict) and document.get("type") in _KINDS

    def take(self, document: dict[str, Any]) -> bool:
        """Add such a document; whether it carried something the model generated."""
        kind = document["type"]
        if kind == "message":
            return self._take_whole(document)
        if kind == "message_start":
            message = _object(document.get("message"))
            self._take_head(message)
            self._take_usage(message, ended=False)
        elif kind == "content_block_start":
            return self._open(document.get("index"), _object(document.get("content_block")))
        elif kind == "content_block_delta":
            return self._add(document.get("index"), _object(document.get("delta")))
        elif kind == "message_delta":
            self._take_stop(_object(document.get("delta")))
            self._take_usage(document, ended=True)
        elif kind == "message_stop":
            self.finished = True
        return False

    def facts(self) -> dict[str, Any]:
        """Fields of `AnswerFacts` besides the choices."""
        return {
            "response_id": self._response_id,
            "model": self._model,
            "usage": self._usage,
            "kv_transfer_params": self._kv_transfer_params,
        }

    def choices(self) -> tuple[ChoiceFact, ...]:
        """The message as a choice of a chat answer would be: text, thinking and tool calls."""
        blocks = [self._blocks[index] for index in sorted(self._blocks)]
        texts = ["".join(block.text) for block in blocks if block.kind == "text"]
        thoughts = ["".join(block.text) for block in blocks if block.kind == "thinking"]
        choice = ChoiceFact(
            index=0,
            content="".join(texts) or None,
            reasoning="".join(thoughts) or None,
            tool_calls=tuple(
                ToolCallFact(block.tool_id, block.name, "".join(block.text) or "{}")
                for block in blocks
                if block.kind == "tool_use"
            ),
            finish_reason=self._stop_reason,
        )
        return (choice,)

    def _take_whole(self, document: dict[str, Any]) -> bool:
        self._take_head(document)
        content = document.get("content")
        for index, block in enumerate(content if isinstance(content, list) else ()):
            self._open(index, _object(block))
        self._take_stop(document)
        self._take_usage(document, ended=True)
        return bool(self._blocks)

    def _take_head(self, message: dict[str, Any]) -> None:
        self.started = True
        self._response_id, self._model = _text(message.get("id")), _text(message.get("model"))
        params = message.get("kv_transfer_params")
        self._kv_transfer_params = params if isinstance(params, dict) else None

    def _take_stop(self, holder: dict[str, Any]) -> None:
        self._stop_reason = _text(holder.get("stop_reason")) or self._stop_reason

    def _take_usage(self, holder: dict[str, Any], *, ended: bool) -> None:
        """The API splits the prompt: what the cache gave, what went into it, and the rest. What is generated
        is counted only at the end."""
        told = _object(holder.get("usage"))
        rest, output = _count(told.get("input_tokens")), _count(told.get("output_tokens"))
        if rest is None:
            return
        read = _count(told.get("cache_read_input_tokens"))
        created = _count(told.get("cache_creation_input_tokens"))
        self._usage = Usage(
            prompt_tokens=rest + (read or 0) + (created or 0),
            completion_tokens=output if ended and output is not None else -1,
            cached_tokens=read,
        )

    def _open(self, index: object, block: dict[str, Any]) -> bool:
        kind = _text(block.get("type"))
        opened = _Block(kind, _text(block.get("id")), _text(block.get("name")))
        self._blocks[index if isinstance(index, int) else len(self._blocks)] = opened
        if kind == "tool_use":
            given = _object(block.get("input"))
            opened.text += [json.dumps(given)] if given else []
            return True
        said = _text(block.get("thinking" if kind == "thinking" else "text"))
        opened.text += [said] if said else []
        return bool(said)

    def _add(self, index: object, delta: dict[str, Any]) -> bool:
        block = self._blocks.get(index) if isinstance(index, int) else None
        names = ("text", "thinking", "partial_json")
        said = next((text for name in names if (text := _text(delta.get(name)))), "")
        if block is not None and said:
            block.text.append(said)
        return bool(said)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
