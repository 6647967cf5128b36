"""Requests of `/v1/chat/completions`, read just far enough to follow them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine_bridge.mapping.prompts import ChatPrompt
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD
from proxy.followed_call import FollowedCall, MessageHasher, NotFollowed, choices_of, model_of


def read_chat(document: dict[str, Any], hasher: MessageHasher) -> Sequence[FollowedCall]:
    """The call of a body. Raises `NotFollowed`. Takes some milliseconds a megabyte."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise NotFollowed("the body has no list of messages")
    call = FollowedCall(
        document=document,
        model=model_of(document),
        messages=tuple(hasher.shape(message) for message in messages),
        head=hasher.head(document),
        prompt=partial(ChatPrompt.from_body, document),
        stream=document.get("stream") is True,
        num_choices=choices_of(document),
        wants_token_ids=document.get("return_token_ids") is True,
        lifecycle=document.get(LIFECYCLE_BODY_FIELD),
        has_tools=bool(document.get("tools") or document.get("functions")),
        written=tuple((message,) for message in messages),
    )
    return (call,)
