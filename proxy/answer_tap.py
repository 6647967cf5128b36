"""What an answer said, read beside the stream: the bytes go to the client whether or not we understand them.

The tap sees the chunks of an answer of any followed API, streamed or not, compressed or not. Which of them
it is, the answer itself tells.
It never raises for what an engine sent, holds nothing back and bounds what it remembers.
"""

import zlib
from typing import Any

import msgspec

from proxy.answer_facts import AnswerFacts, ChoiceFact, ToolCallFact, Usage
from proxy.generate_answer import GenerateAnswer
from proxy.messages_answer import MessagesAnswer
from proxy.responses_answer import ResponsesAnswer
from proxy.sse import EventSplitter

DEFAULT_LIMIT_BYTES = 64 * 1024 * 1024
"""Decoded bytes after which the tap stops reading one answer."""

_DONE = b"[DONE]"

_APIS = (MessagesAnswer, ResponsesAnswer, GenerateAnswer)
"""Those whose answers are not like a chat completion's. Each reads one answer."""


class AnswerTap:
    """Reads one answer. `first_token` and `finished` may be asked after every `feed`."""

    def __init__(
        self,
        status: int,
        content_type: str = "",
        content_encoding: str = "",
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> None:
        self.first_token = False
        self.finished = False
        self._status = status
        self._streamed = content_type.split(";")[0].strip().lower() == "text/event-stream"
        self._splitter = EventSplitter()
        self._body: list[bytes] = []
        self._left_bytes = limit_bytes
        self._blind = ""
        self._inflate: _Inflate | None = None
        coding = content_encoding.strip().lower()
        if coding in ("gzip", "x-gzip", "deflate"):
            self._inflate = _Inflate(coding)
        elif coding not in ("", "identity"):
            self._blind = f"content-encoding {coding}"
        self._choices: dict[int, _OpenChoice] = {}
        self._other: MessagesAnswer | ResponsesAnswer | GenerateAnswer | None = None
        self._facts: dict[str, Any] = {}
        self._num_events = 0
        self._num_malformed = 0

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes of the answer's body."""
        if self._blind:
            return
        if self._inflate is not None:
            try:
                chunk = self._inflate.decode(chunk, self._left_bytes + 1)
            except zlib.error:
                self._blind = "undecodable content"
                return
        self._left_bytes -= len(chunk)
        if self._left_bytes < 0:
            self._blind = "answer too large"
            self._body.clear()
        elif self._streamed:
            for event in self._splitter.feed(chunk):
                self._take_event(event.data)
        else:
            self._body.append(chunk)

    def close(self) -> None:
        """The body has ended as HTTP says it should."""
        if self._blind:
            return
        if self._streamed:
            for event in self._splitter.close():
                self._take_event(event.data)
        elif self._body:
            self._take_document(b"".join(self._body))
            self._body.clear()
            self.finished = self._num_malformed == 0
            self.first_token = self.finished and (bool(self._choices) or self._other is not None)

    def facts(self) -> AnswerFacts:
        """What is known now; may be asked at any time, also after a break."""
        choices = tuple(self._choices[index].fact() for index in sorted(self._choices))
        told = self._facts
        if self._other is not None and self._other.started:
            choices = self._other.choices()
            told = {**told, **self._other.facts()}
        finished = bool(choices) and all(choice.finish_reason for choice in choices)
        return AnswerFacts(
            status=self._status,
            streamed=self._streamed,
            choices=choices,
            complete=self.finished or finished,
            blind=self._blind,
            num_events=self._num_events,
            num_malformed=self._num_malformed,
            **told,
        )

    def _take_event(self, data: bytes) -> None:
        self._num_events += 1
        if data.strip() == _DONE:
            self.finished = True
        else:
            self._take_document(data)

    def _take_document(self, data: bytes) -> None:
        try:
            document = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._num_malformed += 1
            return
        if self._other is None and not self._choices:
            self._other = next((api() for api in _APIS if api.knows(document)), None)
        other = self._other
        if other is not None and other.knows(document):
            generated = other.take(document)
            self.first_token = self.first_token or (generated and self._streamed)
            self.finished = self.finished or other.finished
            return
        if not isinstance(document, dict):
            self._num_malformed += 1
            return
        self._take_fields(document)
        choices = document.get("choices")
        for position, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                self._take_prompt_ids(choice)
                index = choice.get("index")
                index = index if isinstance(index, int) else position
                opened = self._choices.setdefault(index, _OpenChoice(index))
                if opened.take(choice) and not self.first_token and self._streamed:
                    self.first_token = True

    def _take_fields(self, document: dict[str, Any]) -> None:
        if isinstance(document.get("id"), str):
            self._facts.setdefault("response_id", document["id"])
        if isinstance(document.get("model"), str):
            self._facts.setdefault("model", document["model"])
        if isinstance(document.get("usage"), dict):
            self._facts["usage"] = _usage(document["usage"])
        if isinstance(document.get("kv_transfer_params"), dict):
            self._facts["kv_transfer_params"] = document["kv_transfer_params"]
        self._take_prompt_ids(document)
        error = document.get("error")
        if error is not None:
            message = error.get("message") if isinstance(error, dict) else error
            self._facts["error"] = str(message)
        elif "error" in (document.get("object"), document.get("type")):
            self._facts["error"] = str(document.get("message"))

    def _take_prompt_ids(self, holder: dict[str, Any]) -> None:
        """They stand at the top of a chat's answer, and in each choice of a completion's."""
        ids = _ids(holder.get("prompt_token_ids"))
        if ids is not None:
            self._facts["prompt_token_ids"] = ids


class _OpenChoice:
    """A choice whose deltas are still coming in."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._role = "assistant"
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[list[str], list[str], list[str]]] = {}
        self._finish_reason = ""
        self._token_ids: list[int] = []

    def take(self, choice: dict[str, Any]) -> bool:
        """Add a delta or a whole message; whether it carried something the model generated."""
        generated = False
        part = choice.get("delta") or choice.get("message") or {}
        if not isinstance(part, dict):
            part = {}
        role = part.get("role")
        if isinstance(role, str) and role:
            self._role = role
        for value, pieces in (
            (part.get("content") or choice.get("text"), self._content),
            (part.get("reasoning_content") or part.get("reasoning"), self._reasoning),
        ):
            if isinstance(value, str) and value:
                pieces.append(value)
                generated = True
        calls = part.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                self._take_call(position, call)
                generated = True
        ids = _ids(choice.get("token_ids"))
        if ids:
            self._token_ids.extend(ids)
            generated = True
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self._finish_reason = reason
            generated = True
        return generated

    def fact(self) -> ChoiceFact:
        calls = tuple(
            ToolCallFact("".join(ids[:1]), "".join(names[:1]), "".join(arguments))
            for _, (ids, names, arguments) in sorted(self._calls.items())
        )
        return ChoiceFact(
            index=self._index,
            role=self._role,
            content="".join(self._content) if self._content else None,
            reasoning="".join(self._reasoning) if self._reasoning else None,
            tool_calls=calls,
            finish_reason=self._finish_reason,
            token_ids=tuple(self._token_ids),
        )

    def _take_call(self, position: int, call: dict[str, Any]) -> None:
        index = call.get("index")
        slot = self._calls.setdefault(index if isinstance(index, int) else position, ([], [], []))
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        for value, pieces in zip(
            (call.get("id"), function.get("name"), function.get("arguments")), slot, strict=True
        ):
            if isinstance(value, str) and value:
                pieces.append(value)


class _Inflate:
    """Decodes gzip (also of several members) or deflate, piece by piece."""

    def __init__(self, coding: str) -> None:
        self._wbits = zlib.MAX_WBITS if coding == "deflate" else zlib.MAX_WBITS | 16
        self._decoder = zlib.decompressobj(self._wbits)

    def decode(self, chunk: bytes, limit: int) -> bytes:
        """At most about `limit` decoded bytes; more of them means the answer is too large anyway."""
        decoded: list[bytes] = []
        size = 0
        while chunk and size < limit:
            if self._decoder.eof:
                self._decoder = zlib.decompressobj(self._wbits)
            piece = self._decoder.decompress(chunk, limit - size)
            decoded.append(piece)
            size += len(piece)
            chunk = self._decoder.unconsumed_tail or self._decoder.unused_data
        return b"".join(decoded)


def _usage(raw: dict[str, Any]) -> Usage:
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, completion = raw.get("prompt_tokens"), raw.get("completion_tokens")
    return Usage(
        prompt_tokens=prompt if isinstance(prompt, int) else -1,
        completion_tokens=completion if isinstance(completion, int) else -1,
        cached_tokens=cached if isinstance(cached, int) else None,
    )


def _ids(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    return None
