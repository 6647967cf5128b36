"""What is known of an answer, whichever API it was given by."""

from collections.abc import Mapping
from typing import Any

import msgspec


class ToolCallFact(msgspec.Struct, frozen=True):
    """A tool call as it went out; `arguments` is the text the model wrote."""

    id: str
    name: str
    arguments: str


class ChoiceFact(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer, put together from its deltas. `finish_reason` is empty while it was open."""

    index: int
    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCallFact, ...] = ()
    finish_reason: str = ""
    token_ids: tuple[int, ...] = ()

    def message(self) -> dict[str, Any]:
        """The assistant message that a client would put into its next call."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own token counts; -1 (`cached_tokens`: None) where it did not say."""

    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int | None = None


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the tap learned.

    `complete` means the answer was whole: `[DONE]`, or a parsed body, or every choice finished. `blind` says
    why the tap could not read (part of) it; empty when it could. `error` is the engine's message when the
    answer, or an event in it, was an error. `answer_texts` are the texts that a request naming the response
    is put behind, `num_items` the items of a response.
    """

    status: int = 0
    streamed: bool = False
    response_id: str = ""
    model: str = ""
    choices: tuple[ChoiceFact, ...] = ()
    usage: Usage = Usage()
    kv_transfer_params: Mapping[str, Any] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    answer_texts: tuple[str, ...] = ()
    num_items: int = 0
    complete: bool = False
    error: str = ""
    blind: str = ""
    num_events: int = 0
    num_malformed: int = 0

    @property
    def tool_call_ids(self) -> tuple[str, ...]:
        """Ids of every tool call of every choice."""
        return tuple(call.id for choice in self.choices for call in choice.tool_calls if call.id)
