"""Agents that talk to an engine, as a test tool: message lists grow by answers, and each answer is
recorded."""

import json
from itertools import count
from typing import Any

from proxy.call_readers import parse_calls
from proxy.followed_call import FollowedCall, MessageHasher

HASHER = MessageHasher(b"test key")
Message = dict[str, Any]


def system(text: str = "be good") -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None = None, *call_ids: str) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if call_ids:
        message["tool_calls"] = [
            {"id": known, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for known in call_ids
        ]
    return message


def tool(call_id: str, text: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat(messages: list[Message], **fields: Any) -> FollowedCall:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    [call] = parse_calls("/v1/chat/completions", body, HASHER)
    return call


_numbers = count(1)


def fresh(prefix: str) -> str:
    """A name that no other call of this function returned."""
    return f"{prefix}-{next(_numbers)}"
