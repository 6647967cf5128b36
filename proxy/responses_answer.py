"""An answer of the Responses API, whole or from the events of its stream, as the tap meets it."""

from typing import Any

from engine_bridge.mapping.responses import custom_arguments, flat_name
from proxy.answer_facts import ChoiceFact, ToolCallFact, Usage

EVENT_PREFIX = "response."
WHOLE = ("response", "response.compaction")
"""The `object` of an answer that is not streamed."""

_ENDS = ("response.completed", "response.incomplete", "response.failed")
_FINISHED = ("completed", "incomplete", "failed", "cancelled")
_OPENED = ("response.output_item.added", "response.output_item.done")
_DELTAS = (".delta", ".added")


class ResponsesAnswer:
    """One response, put together. `finished` when the API's own end of it has come, `error` if it failed."""

    def __init__(self) -> None:
        self.started = False
        self.finished = False
        self.error = ""
        self._head: dict[str, Any] = {}
        self._items: dict[int, dict[str, Any]] = {}

    @staticmethod
    def knows(document: Any) -> bool:
        """Whether a document belongs to such an answer."""
        if not isinstance(document, dict):
            return False
        kind = document.get("type")
        return document.get("object") in WHOLE or (isinstance(kind, str) and kind.startswith(EVENT_PREFIX))

    def take(self, document: dict[str, Any]) -> bool:
        """Add such a document; whether it carried something the model generated."""
        if document.get("object") in WHOLE:
            self._take_response(document)
            self.finished = document.get("status") in _FINISHED
            return bool(self._items)
        kind = document["type"]
        self.started = True
        if kind in _OPENED:
            index = document.get("output_index")
            self._items[index if isinstance(index, int) else len(self._items)] = _object(document.get("item"))
        elif isinstance(document.get("response"), dict):
            self._take_response(document["response"])
            self.finished = self.finished or kind in _ENDS
        return kind.endswith(_DELTAS) or kind in _OPENED

    def facts(self) -> dict[str, Any]:
        """Fields of `AnswerFacts` besides the choices."""
        params = self._head.get("kv_transfer_params")
        return {
            "response_id": _text(self._head.get("id")),
            "model": _text(self._head.get("model")),
            "usage": _usage(_object(self._head.get("usage"))),
            "kv_transfer_params": params if isinstance(params, dict) else None,
            "answer_texts": tuple(self._texts()),
            "num_items": len(self._items),
            **({"error": self.error} if self.error else {}),
        }

    def choices(self) -> tuple[ChoiceFact, ...]:
        """The response as a choice of a chat answer would be: text, thinking and tool calls."""
        items = self._listed()
        calls = tuple(call for item in items if (call := _call(item)) is not None)
        thoughts = [_joined(item, "reasoning_text") for item in items if item.get("type") == "reasoning"]
        choice = ChoiceFact(
            index=0,
            content="".join(self._texts()) or None,
            reasoning="".join(thoughts) or None,
            tool_calls=calls,
            finish_reason=self._finish_reason(bool(calls)),
        )
        return (choice,)

    def _take_response(self, response: dict[str, Any]) -> None:
        self.started = True
        self._head = response
        output = response.get("output")
        if isinstance(output, list) and output:
            self._items = {at: _object(item) for at, item in enumerate(output)}
        error = response.get("error")
        if error is not None:
            self.error = _text(_object(error).get("message")) or str(error)

    def _listed(self) -> list[dict[str, Any]]:
        return [self._items[index] for index in sorted(self._items)]

    def _texts(self) -> list[str]:
        """Each text part of each message: later requests hold them apart."""
        messages = (item for item in self._listed() if item.get("type") == "message")
        parts = (part for item in messages for part in _list(item.get("content")))
        return [_text(part.get("text")) for part in parts if part.get("type") == "output_text"]

    def _finish_reason(self, called: bool) -> str:
        match self._head.get("status") if self.finished else "":
            case "completed":
                return "tool_calls" if called else "stop"
            case "incomplete":
                return "length"
            case status:
                return _text(status)


def _call(item: dict[str, Any]) -> ToolCallFact | None:
    call_id, name = _text(item.get("call_id")), _text(item.get("name"))
    if item.get("type") == "function_call":
        return ToolCallFact(
            call_id, flat_name(_text(item.get("namespace")), name), _text(item.get("arguments"))
        )
    if item.get("type") == "custom_tool_call":
        return ToolCallFact(call_id, name, custom_arguments(_text(item.get("input"))))
    return None


def _joined(item: dict[str, Any], kind: str) -> str:
    return "".join(_text(part.get("text")) for part in _list(item.get("content")) if part.get("type") == kind)


def _usage(told: dict[str, Any]) -> Usage:
    cached = _object(told.get("input_tokens_details")).get("cached_tokens")
    return Usage(
        prompt_tokens=_count(told.get("input_tokens")),
        completion_tokens=_count(told.get("output_tokens")),
        cached_tokens=cached if isinstance(cached, int) else None,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else -1


def _list(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
