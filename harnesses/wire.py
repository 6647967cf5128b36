"""Answers of the scripted model as the three APIs write them, whole or as server-sent events."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from harnesses.script import Call, Reply

PIECE = 24
"""Characters of text that one event of a stream carries."""


class Tokens(msgspec.Struct, frozen=True):
    """Counts that an answer tells."""

    prompt: int
    answer: int
    cached: int = 0


class Answer(msgspec.Struct, frozen=True):
    """A reply with the ids it goes out under: the answer's own, and one a call."""

    reply: Reply
    answer_id: str
    call_ids: Sequence[str]
    model: str
    created: int

    def chat_message(self) -> dict[str, Any]:
        """The assistant's message as a chat request carries it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.reply.text}
        if self.reply.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": flat_name(call), "arguments": arguments(call)},
                }
                for call, call_id in self.calls()
            ]
        return message

    def calls(self) -> Iterator[tuple[Call, str]]:
        return zip(self.reply.calls, self.call_ids, strict=True)


class Form(Protocol):
    """How an API writes an answer."""

    def whole(self, answer: Answer, tokens: Tokens) -> dict[str, Any]:
        """The answer that is not streamed."""
        ...

    def opening(self, answer: Answer, tokens: Tokens) -> Iterator[bytes]:
        """Events before the first token."""
        ...

    def rest(self, answer: Answer, tokens: Tokens, body: Mapping[str, Any]) -> Iterator[bytes]:
        """Events from the first token to the end."""
        ...


def new_answer(prefix: str, call_prefix: str, reply: Reply, model: str, created: int) -> Answer:
    """A reply under fresh ids. `created` in seconds since the epoch."""
    calls = [f"{call_prefix}{secrets.token_hex(12)}" for _ in reply.calls]
    return Answer(reply, f"{prefix}{secrets.token_hex(12)}", calls, model, created)


def arguments(call: Call) -> str:
    """A call's arguments as JSON; free text in the form of the function that stands in for the tool."""
    if call.tool.schema is None:
        return json.dumps({"input": call.text}, ensure_ascii=False)
    return json.dumps(call.arguments, ensure_ascii=False)


def flat_name(call: Call) -> str:
    """A tool's name among those of all namespaces."""
    return f"{call.tool.namespace}__{call.tool.name}" if call.tool.namespace else call.tool.name


def pieces(text: str) -> Iterator[str]:
    """A text in the pieces of a stream."""
    for begin in range(0, len(text), PIECE):
        yield text[begin : begin + PIECE]


def event(document: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()


class ChatForm:
    """`/v1/chat/completions`."""

    def whole(self, answer: Answer, tokens: Tokens) -> dict[str, Any]:
        message = answer.chat_message()
        message["content"] = message["content"] or None
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answer)}
        head = self._head(answer, "chat.completion")
        return {**head, "choices": [choice], "usage": self._usage(tokens)}

    def opening(self, answer: Answer, tokens: Tokens) -> Iterator[bytes]:
        yield self._piece(answer, {"role": "assistant", "content": ""})

    def rest(self, answer: Answer, tokens: Tokens, body: Mapping[str, Any]) -> Iterator[bytes]:
        for piece in pieces(answer.reply.text):
            yield self._piece(answer, {"content": piece})
        for index, (call, call_id) in enumerate(answer.calls()):
            function: dict[str, Any] = {"name": flat_name(call), "arguments": ""}
            begin = {"index": index, "id": call_id, "type": "function", "function": function}
            yield self._piece(answer, {"tool_calls": [begin]})
            for piece in pieces(arguments(call)):
                yield self._piece(
                    answer, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
                )
        yield self._piece(answer, {}, _finish(answer))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            head = self._head(answer, "chat.completion.chunk")
            yield event({**head, "choices": [], "usage": self._usage(tokens)})
        yield b"data: [DONE]\n\n"

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {"id": answer.answer_id, "object": kind, "created": answer.created, "model": answer.model}

    def _piece(self, answer: Answer, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event({**self._head(answer, "chat.completion.chunk"), "choices": [choice]})

    def _usage(self, tokens: Tokens) -> dict[str, Any]:
        return {
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.answer,
            "total_tokens": tokens.prompt + tokens.answer,
            "prompt_tokens_details": {"cached_tokens": tokens.cached},
        }


class ResponsesForm:
    """`/v1/responses`: one message item for text, then one item a call."""

    def whole(self, answer: Answer, tokens: Tokens) -> dict[str, Any]:
        return self._response(answer, "completed", self._items(answer), tokens)

    def opening(self, answer: Answer, tokens: Tokens) -> Iterator[bytes]:
        begun = self._response(answer, "in_progress", [], None)
        yield self._event("response.created", 0, {"response": begun})
        yield self._event("response.in_progress", 1, {"response": begun})

    def rest(self, answer: Answer, tokens: Tokens, body: Mapping[str, Any]) -> Iterator[bytes]:
        number = 2
        for index, item in enumerate(self._items(answer)):
            for kind, fields in self._item_events(index, item):
                yield self._event(kind, number, fields)
                number += 1
        ended = self._response(answer, "completed", self._items(answer), tokens)
        yield self._event("response.completed", number, {"response": ended})

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if answer.reply.text:
            part = {"type": "output_text", "text": answer.reply.text, "annotations": [], "logprobs": []}
            head = {"id": f"msg_{answer.answer_id}", "type": "message", "status": "completed"}
            items.append({**head, "role": "assistant", "content": [part]})
        for call, call_id in answer.calls():
            item: dict[str, Any] = {
                "id": f"fc_{call_id}",
                "status": "completed",
                "call_id": call_id,
                "name": call.tool.name,
            }
            if call.tool.kind == "custom":
                item |= {"type": "custom_tool_call", "input": call.text}
            else:
                item |= {"type": "function_call", "arguments": arguments(call)}
            items.append(item | ({"namespace": call.tool.namespace} if call.tool.namespace else {}))
        return items

    def _item_events(self, index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            begun = {**item, "status": "in_progress", "content": []}
            yield "response.output_item.added", {"output_index": index, "item": begun}
            within = {**place, "content_index": 0}
            yield "response.content_part.added", {**within, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield "response.output_text.delta", {**within, "delta": piece, "logprobs": []}
            yield "response.output_text.done", {**within, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**within, "part": part}
        else:
            field, kind = (
                ("input", "response.custom_tool_call_input")
                if item["type"] == "custom_tool_call"
                else ("arguments", "response.function_call_arguments")
            )
            begun = {**item, "status": "in_progress", field: ""}
            yield "response.output_item.added", {"output_index": index, "item": begun}
            for piece in pieces(item[field]):
                yield f"{kind}.delta", {**place, "delta": piece}
            yield f"{kind}.done", {**place, field: item[field], "name": item["name"]}
        yield "response.output_item.done", {"output_index": index, "item": item}

    def _event(self, kind: str, number: int, fields: Mapping[str, Any]) -> bytes:
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _response(
        self, answer: Answer, status: str, output: Sequence[dict[str, Any]], tokens: Tokens | None
    ) -> dict[str, Any]:
        usage = tokens and {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens.prompt + tokens.answer,
        }
        return {
            "id": answer.answer_id,
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "model": answer.model,
            "output": list(output),
            "usage": usage,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
        }


class MessagesForm:
    """`/v1/messages`."""

    def whole(self, answer: Answer, tokens: Tokens) -> dict[str, Any]:
        ended = {"stop_reason": self._reason(answer), "usage": self._usage(tokens)}
        return {**self._message(answer, tokens), "content": self._blocks(answer), **ended}

    def opening(self, answer: Answer, tokens: Tokens) -> Iterator[bytes]:
        begun = self._message(answer, tokens)
        yield self._event("message_start", {"message": begun})
        yield self._event("ping", {})

    def rest(self, answer: Answer, tokens: Tokens, body: Mapping[str, Any]) -> Iterator[bytes]:
        for index, block in enumerate(self._blocks(answer)):
            if block["type"] == "text":
                begun, field, kind, text = {**block, "text": ""}, "text", "text_delta", block["text"]
            else:
                begun, field, kind = {**block, "input": {}}, "partial_json", "input_json_delta"
                text = json.dumps(block["input"], ensure_ascii=False)
            yield self._event("content_block_start", {"index": index, "content_block": begun})
            for piece in pieces(text):
                delta = {"type": kind, field: piece}
                yield self._event("content_block_delta", {"index": index, "delta": delta})
            yield self._event("content_block_stop", {"index": index})
        ended = {"stop_reason": self._reason(answer), "stop_sequence": None}
        yield self._event("message_delta", {"delta": ended, "usage": self._usage(tokens)})
        yield self._event("message_stop", {})

    def _blocks(self, answer: Answer) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if answer.reply.text:
            blocks.append({"type": "text", "text": answer.reply.text})
        for call, call_id in answer.calls():
            blocks.append(
                {"type": "tool_use", "id": call_id, "name": call.tool.name, "input": call.arguments}
            )
        return blocks

    def _message(self, answer: Answer, tokens: Tokens) -> dict[str, Any]:
        return {
            "id": answer.answer_id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(tokens), "output_tokens": 1},
        }

    def _usage(self, tokens: Tokens) -> dict[str, Any]:
        return {
            "input_tokens": tokens.prompt - tokens.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": tokens.cached,
            "output_tokens": tokens.answer,
        }

    def _reason(self, answer: Answer) -> str:
        return "tool_use" if answer.reply.calls else "end_turn"

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return event({"type": kind, **fields}, kind)


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.reply.calls else "stop"
