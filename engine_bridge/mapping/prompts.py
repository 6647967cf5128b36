"""What of a chat request decides its prompt."""

from typing import Any

import msgspec

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.ranges import MappedPrompt

_EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
_FOREIGN = {
    "chat_template": "the request brings its own chat template",
    "truncate_prompt_tokens": "the request asks for a truncated prompt",
    "prompt_embeds": "the request carries embeddings",
    "input_ids": "the request brings its own token ids",
}
_FLAGS = {"echo": "echo is set", "add_special_tokens": "add_special_tokens is set"}


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an OpenAI chat request that its prompt depends on, as the client sent them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, str]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> "ChatPrompt":
        """Read a parsed request body. Raises `Unmappable` for a request whose prompt has another source."""
        for field, reason in _FOREIGN.items():
            if body.get(field) is not None:
                raise Unmappable(reason)
        for field, reason in _FLAGS.items():
            if body.get(field):
                raise Unmappable(reason)
        transfer = body.get("kv_transfer_params")
        if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
            raise Unmappable("the request brings its own token ids")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RejectedByEngine("messages must be a list with at least one entry")
        if not all(isinstance(message, dict) for message in messages):
            raise RejectedByEngine("every message must be an object")
        tools = body.get("tools")
        if tools is not None and (not isinstance(tools, list) or not tools):
            raise RejectedByEngine("tools must be a list with at least one entry, or absent")
        effort = body.get("reasoning_effort")
        if effort is not None and effort not in _EFFORTS:
            raise RejectedByEngine(f"reasoning_effort {effort!r} is not a known level")
        kwargs = body.get("chat_template_kwargs")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise RejectedByEngine("chat_template_kwargs must be an object")
        generate = _flag(body, "add_generation_prompt", True)
        extend = _flag(body, "continue_final_message", False)
        if generate and extend:
            raise RejectedByEngine("continue_final_message excludes add_generation_prompt")
        return cls(
            messages=messages,
            tools=tools,
            tool_choice=body.get("tool_choice"),
            documents=_documents(body.get("documents")),
            add_generation_prompt=generate,
            continue_final_message=extend,
            chat_template_kwargs=kwargs,
            reasoning_effort=effort,
        )


class ConvertedPrompt(msgspec.Struct, frozen=True):
    """A chat prompt, and how its messages are the client's.

    `num_system` counts the messages that are the client's `system`, `counts[i]` those up to the end of the
    client's message i. `last_moved` is the last message whose text moved to the front, -1 for none.
    """

    prompt: ChatPrompt
    num_system: int
    counts: tuple[int, ...]
    last_moved: int = -1

    def by_client_message(self, mapped: MappedPrompt) -> MappedPrompt:
        """The same tokens by the client's messages; its system prompt belongs to the head.

        Where a later message's text moved to the front, nothing behind that text is an earlier message's
        alone: those are empty.
        """
        ends = (mapped.head_end, *mapped.message_ends)
        front = mapped.head_end
        return msgspec.structs.replace(
            mapped,
            head_end=ends[self.num_system] if self.last_moved < 0 else front,
            message_ends=tuple(
                ends[count] if at >= self.last_moved else front for at, count in enumerate(self.counts)
            ),
        )


def _flag(body: dict[str, Any], field: str, default: bool) -> bool:
    value = body.get(field, default)
    if not isinstance(value, bool):
        raise Unmappable(f"{field} is not a boolean")
    return value


def _documents(value: Any) -> list[dict[str, str]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(
        isinstance(document, dict) and all(isinstance(text, str) for text in document.values())
        for document in value
    ):
        raise RejectedByEngine("documents must be a list of objects with string values")
    return value
