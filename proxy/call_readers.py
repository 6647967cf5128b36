"""The APIs whose calls are followed, each with its way to read a body."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from proxy.chat_request import read_chat
from proxy.completion_request import read_completion
from proxy.followed_call import FollowedCall, MessageHasher, NotFollowed, decode_body
from proxy.generate_request import read_generate
from proxy.messages_request import read_messages
from proxy.responses_request import read_compaction, read_responses

OFF_LOOP_BYTES = 64 * 1024
"""Bodies larger than this are read in a worker thread."""


class CallReader(Protocol):
    """Reads a decoded body into the calls that it asks for, one a prompt and at least one.

    Reading never changes the body that is forwarded. Raises `NotFollowed` with the reason.
    """

    def __call__(self, document: dict[str, Any], hasher: MessageHasher) -> Sequence[FollowedCall]: ...


READERS: Mapping[str, CallReader] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/messages": read_messages,
    "/v1/responses": read_responses,
    "/v1/responses/compact": read_compaction,
    "/generate": read_generate,
}
"""By path."""


def calls_of(path: str, document: object, hasher: MessageHasher) -> Sequence[FollowedCall]:
    """The calls that a decoded body asks for. Raises `NotFollowed`. Takes some milliseconds a megabyte."""
    reader = READERS.get(path)
    if reader is None:
        raise NotFollowed(f"{path} is not followed")
    try:
        if not isinstance(document, dict):
            raise NotFollowed("the body is no JSON object")
        return reader(document, hasher)
    except NotFollowed as reason:
        raise NotFollowed(f"{path} is not followed: {reason}") from reason


def parse_calls(path: str, body: bytes, hasher: MessageHasher) -> Sequence[FollowedCall]:
    """`calls_of` a body as it came. Raises `NotFollowed`."""
    try:
        document = decode_body(body)
    except NotFollowed:
        document = None
    return calls_of(path, document, hasher)


async def decode_request(body: bytes) -> object:
    """`decode_body`, off the event loop for large bodies. Raises `NotFollowed`."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(decode_body, body)
    return decode_body(body)


async def read_calls(
    path: str, document: object, size_bytes: int, hasher: MessageHasher
) -> Sequence[FollowedCall]:
    """`calls_of`, off the event loop for large bodies."""
    if size_bytes > OFF_LOOP_BYTES:
        return await asyncio.to_thread(calls_of, path, document, hasher)
    return calls_of(path, document, hasher)
