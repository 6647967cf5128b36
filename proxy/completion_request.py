"""Requests of `/v1/completions`: each of their prompts is followed as a call with a single message."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine_bridge.mapping.plain import PlainPrompt, given_prompts
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD
from proxy.followed_call import FollowedCall, MessageHasher, NotFollowed, choices_of, model_of

PROMPT_ROLE = "prompt"


def read_completion(document: dict[str, Any], hasher: MessageHasher) -> Sequence[FollowedCall]:
    """The calls of a body, one a prompt. Raises `NotFollowed`."""
    prompts = given_prompts(document.get("prompt"))
    if not prompts:
        raise NotFollowed("the prompt is neither text nor token ids")
    model, head = model_of(document), hasher.head(document)
    return tuple(
        FollowedCall(
            document=document,
            model=model,
            messages=(hasher.text(PROMPT_ROLE, given),),
            head=head,
            prompt=partial(PlainPrompt.from_body, document, given),
            stream=document.get("stream") is True,
            num_choices=choices_of(document),
            num_prompts=len(prompts),
            wants_token_ids=document.get("return_token_ids") is True,
            lifecycle=document.get(LIFECYCLE_BODY_FIELD),
        )
        for given in prompts
    )
