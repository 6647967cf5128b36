"""Requests of `/v1/responses` and `/v1/responses/compact`: followed by the items of their list, as the engine
takes them.

Ids, statuses and marks of an item are no difference. Spans count the client's own `input`; instructions are
the head. Of items that become one message, the first stands for what the model said.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.responses import Item, ResponsesPrompt, groups
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD
from proxy.followed_call import (
    Conversation,
    FollowedCall,
    MessageHasher,
    MessageShape,
    NotFollowed,
    model_of,
)


def read_responses(document: dict[str, Any], hasher: MessageHasher) -> Sequence[FollowedCall]:
    """The call of a body, without the conversation before it. Raises `NotFollowed`."""
    if document.get("background"):
        raise NotFollowed("a response in the background outlives its request")
    follows = document.get("previous_response_id")
    if not isinstance(follows, str | None):
        raise NotFollowed("previous_response_id is not text")
    try:
        prompt = ResponsesPrompt.from_body(document)
    except Unmappable as error:
        raise NotFollowed(error.reason) from error
    model = model_of(document)
    head = {
        "model": model,
        "instructions": prompt.instructions,
        "tools": prompt.tools,
        "chat_template_kwargs": prompt.chat_template_kwargs,
        "effort": prompt.effort,
    }
    shapes = item_shapes(prompt.items, hasher)
    call = FollowedCall(
        document=document,
        model=model,
        messages=shapes,
        head=hasher.digest_of(head),
        prompt=lambda: prompt,
        stream=document.get("stream") is True,
        tells_token_ids=False,
        lifecycle=document.get(LIFECYCLE_BODY_FIELD),
        has_tools=bool(document.get("tools")),
        system=hasher.digest_of(prompt.instructions) if prompt.instructions else b"",
        written=tuple((item.message,) for item in prompt.items),
        conversation=Conversation(
            items=prompt.items,
            shapes=shapes,
            size_bytes=sum(len(repr(item.message)) for item in prompt.items),
            follows=follows or "",
            kept=document.get("store") is not False,
        ),
    )
    return (call,)


def read_compaction(document: dict[str, Any], hasher: MessageHasher) -> Sequence[FollowedCall]:
    """The call of a body of `/v1/responses/compact`. Raises `NotFollowed`."""
    if not document.get("input") and not document.get("previous_response_id"):
        raise NotFollowed("there is nothing to compact")
    return [
        msgspec.structs.replace(
            call,
            prompt=_of_its_own,
            label_field="",
            conversation=call.conversation and msgspec.structs.replace(call.conversation, kept=False),
            compacts=True,
        )
        for call in read_responses({**document, "input": document.get("input") or []}, hasher)
    ]


def _of_its_own() -> ResponsesPrompt:
    raise Unmappable("a compaction makes a prompt of its own")


def item_shapes(items: Sequence[Item], hasher: MessageHasher) -> tuple[MessageShape, ...]:
    """The shape of each item; the first of a message carries what ties the whole message to its call."""
    shapes = [hasher.shape(item.message) for item in items]
    for begin, message in groups(items):
        if message is not items[begin].message:
            whole = hasher.shape(message)
            shapes[begin] = msgspec.structs.replace(
                shapes[begin], echo=whole.echo, tool_call_ids=whole.tool_call_ids
            )
    return tuple(shapes)
