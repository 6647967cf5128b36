"""Prompts of plain text or of token ids, as `/v1/completions` and SGLang's `/generate` take them.

Follows vLLM 0.32 (`entrypoints/openai/completion/protocol.py`, `renderers/inputs/preprocess.py`,
`renderers/params.py`): text is encoded with the tokenizer's special tokens around it unless the request says
otherwise, token ids are taken as they are. So does SGLang 0.5 (`managers/tokenizer_manager.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from engine_bridge.chunk_keys import extend_keys
from engine_bridge.errors import Unmappable
from engine_bridge.mapping.ranges import MappedPrompt

MAX_PROMPTS = 1024
"""What the engine takes in one request (`VLLM_MAX_COMPLETION_PROMPTS`)."""

_TOKEN_LIMIT = 1 << 32
_FOREIGN = {
    "suffix": "the request has a suffix: the model's own fill-in form makes its prompt",
    "truncate_prompt_tokens": "the request asks for a truncated prompt",
    "prompt_embeds": "the request carries embeddings",
}
_FOREIGN_TO_GENERATE = {
    "input_embeds": "the request carries embeddings",
    "image_data": "the request carries images",
    "video_data": "the request carries videos",
    "audio_data": "the request carries sounds",
    "lora_path": "the request names an adapter",
    "session_params": "the prompt goes on with a session that the engine keeps",
}

Given: TypeAlias = str | list[int]
"""A prompt as a client wrote it."""


class PlainPrompt(msgspec.Struct, frozen=True):
    """One prompt: text, or token ids. `special` says whether the tokenizer adds its own tokens to a text."""

    given: Given
    special: bool = True

    @classmethod
    def from_body(cls, body: Mapping[str, Any], given: Given) -> PlainPrompt:
        """One of a request's prompts. Raises `Unmappable` if other fields of the body change its tokens."""
        _refuse(body, _FOREIGN)
        if body.get("use_beam_search"):
            raise Unmappable("a beam search is many requests to the engine")
        special = body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise Unmappable("add_special_tokens is not a boolean")
        return cls(given, special)

    @classmethod
    def from_generate(cls, body: Mapping[str, Any], given: Given) -> PlainPrompt:
        """One prompt of a request of SGLang's own API. Raises `Unmappable` as above."""
        _refuse(body, _FOREIGN_TO_GENERATE)
        return cls(given)


def _refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    for field, reason in reasons.items():
        if body.get(field) is not None:
            raise Unmappable(reason)


def given_prompts(given: Any) -> Sequence[Given]:
    """The prompts that a request gives, in order; empty if they are none that we know how to read."""
    if isinstance(given, str) or _are_ids(given):
        return [given]
    if not isinstance(given, list) or len(given) > MAX_PROMPTS:
        return ()
    if all(isinstance(each, str) for each in given) or all(map(_are_ids, given)):
        return given
    return ()


def _are_ids(value: object) -> bool:
    """Exact integers only: engines also take what can be turned into one, and we do not guess how."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(each) is int and 0 <= each < _TOKEN_LIMIT for each in value)
    )


def mapped_plain(ids: array[int], num_kept: int, keys: bytearray, chunk_tokens: int) -> MappedPrompt:
    """A prompt that is one message from its first token to its last.

    `keys` are those of a prompt with the same first `num_kept` tokens, and are brought up to date in place.
    """
    extend_keys(keys, ids, num_kept, chunk_tokens)
    return MappedPrompt(
        token_ids=ids[:],
        num_tokens=len(ids),
        num_kept_tokens=num_kept,
        head_end=0,
        message_ends=(len(ids),),
        tools_end=0,
        chunk_keys=bytes(keys),
        chunk_tokens=chunk_tokens,
    )
