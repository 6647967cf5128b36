"""Requests of SGLang's `/generate`: each of their prompts is followed as a call with a single message."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine_bridge.mapping.plain import PlainPrompt, given_prompts
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD
from proxy.completion_request import PROMPT_ROLE
from proxy.followed_call import FollowedCall, MessageHasher, NotFollowed, choices_of


def read_generate(document: dict[str, Any], hasher: MessageHasher) -> Sequence[FollowedCall]:
    """The calls of a body, one a prompt. It names no model: it is the one that is served. Raises
    `NotFollowed`."""
    text, ids = document.get("text"), document.get("input_ids")
    prompts = () if text is not None and ids is not None else given_prompts(ids if text is None else text)
    if not prompts:
        raise NotFollowed("the prompt is neither text nor token ids")
    sampling = document.get("sampling_params")
    num_choices = choices_of(sampling) if isinstance(sampling, dict) else 1
    head = hasher.digest_of({"lora_path": document.get("lora_path")})
    return tuple(
        FollowedCall(
            document=document,
            model="",
            messages=(hasher.text(PROMPT_ROLE, given),),
            head=head,
            prompt=partial(PlainPrompt.from_generate, document, given),
            stream=document.get("stream") is True,
            num_choices=num_choices,
            num_prompts=len(prompts),
            tells_token_ids=False,
            label_field="",
            lifecycle=document.get(LIFECYCLE_BODY_FIELD),
        )
        for given in prompts
    )
