"""Requests of `/v1/messages`, Anthropic's API: followed by the chat messages that the engine makes of them.

So what the engine never sees is no difference between two messages: cache marks, signatures, the line by
which Claude Code names itself. Spans count the client's own `messages`; its system prompt is the head.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.anthropic import MessagesPrompt
from lifecycle.core.observations import PinRequest, SpanName
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD
from proxy.body_edit import ENGINE_EXTRA_ARGS
from proxy.followed_call import FollowedCall, MessageHasher, NotFollowed, model_of

LEASE_SECONDS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
"""What `cache_control.ttl` may say."""


def read_messages(document: dict[str, Any], hasher: MessageHasher) -> Sequence[FollowedCall]:
    """The call of a body. Raises `NotFollowed`. Takes some milliseconds a megabyte."""
    try:
        prompt = MessagesPrompt.from_body(document)
    except Unmappable as error:
        raise NotFollowed(error.reason) from error
    model = model_of(document)
    head = {
        "model": model,
        "system": prompt.system,
        "tools": prompt.tools,
        "chat_template_kwargs": prompt.chat_template_kwargs,
        "effort": prompt.effort,
        "thinking_off": prompt.thinking_off,
    }
    call = FollowedCall(
        document=document,
        model=model,
        messages=tuple(hasher.joined(turn.role, turn.messages) for turn in prompt.turns),
        head=hasher.digest_of(head),
        prompt=lambda: prompt,
        stream=document.get("stream") is True,
        tells_token_ids=False,
        label_field=ENGINE_EXTRA_ARGS,
        pins=tuple(leases(document)),
        lifecycle=document.get(LIFECYCLE_BODY_FIELD),
        has_tools=bool(prompt.tools),
        system=hasher.digest_of(prompt.system) if prompt.system else b"",
        written=tuple(turn.messages for turn in prompt.turns),
    )
    return (call,)


def leases(document: Mapping[str, Any]) -> Iterator[PinRequest]:
    """What the body's cache marks ask to be held, the longest leases first.

    A mark holds everything before it, so of the marks of one lease only the last counts, and only if it
    stands behind those of longer ones. Marks without a `ttl` ask for nothing beyond the usual.
    """
    last: dict[float, tuple[int, SpanName]] = {}
    for place, (span, marked) in enumerate(_marked(document)):
        mark = marked.get("cache_control") if isinstance(marked, dict) else None
        ttl = mark.get("ttl") if isinstance(mark, dict) else None
        if isinstance(ttl, str) and ttl in LEASE_SECONDS:
            last[LEASE_SECONDS[ttl]] = place, span
    held = -1
    for seconds in sorted(last, reverse=True):
        place, span = last[seconds]
        if place > held:
            yield PinRequest(span, seconds)
            held = place


def _marked(document: Mapping[str, Any]) -> Iterator[tuple[SpanName, object]]:
    """Whatever may carry a mark, in the order of the prompt, with the span that ends there."""
    for tool in _listed(document.get("tools")):
        yield "tools", tool
    for block in _listed(document.get("system")):
        yield "system", block
    messages = _listed(document.get("messages"))
    for at, message in enumerate(messages):
        for block in _listed(message.get("content")):
            yield (at, at + 1), block
    if messages:
        yield (len(messages) - 1, len(messages)), document


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
