"""A chat completion request, read just far enough to know whose it is and what its messages are.

Reading never changes the body that is forwarded. Messages become keyed digests of a canonical form, so that
two spellings of one message (key order, absent or null fields, arguments as text or as an object) are one
message, and nobody without the key can test a guess of its text.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from lifecycle.core.ids import DIGEST_BYTES
from lifecycle.core.observations import MessageFact
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD
from proxy.operations import MAX_LABEL_LENGTH, is_label

OFF_LOOP_BYTES = 64 * 1024
"""Bodies larger than this are read in a worker thread."""

_HEAD_FIELDS = (
    "model",
    "tools",
    "functions",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
    "mm_processor_kwargs",
)
"""What a template sees besides the messages, and what decides which template and tokenizer it is."""

_END_OF_THINKING = "</think>"


class NotAChatCall(Exception):
    """The body is no chat completion request that can be followed; it is forwarded all the same."""


class MessageShape(msgspec.Struct, frozen=True):
    """A message of the list: its fact, and what ties it to calls before.

    `echo` digests an assistant message as far as clients reproduce it: without reasoning, ids and outer
    whitespace; empty for other roles and for empty messages. `tool_call_ids` are the calls an assistant
    message makes; `answers` is the id that a tool message answers.
    """

    fact: MessageFact
    echo: bytes = b""
    tool_call_ids: tuple[str, ...] = ()
    answers: str = ""


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion request. `document` is the whole decoded body; `head` digests what the template
    sees besides the messages; `lifecycle` is the decoded `kv_lifecycle`, None if there was none."""

    document: Mapping[str, Any]
    model: str
    messages: tuple[MessageShape, ...]
    head: bytes
    stream: bool = False
    num_choices: int = 1
    include_usage: bool = False
    wants_token_ids: bool = False
    lifecycle: object = None

    @property
    def facts(self) -> tuple[MessageFact, ...]:
        """The messages as the lifecycle core knows them."""
        return tuple(message.fact for message in self.messages)


class MessageHasher:
    """Digests under one secret key (at most 64 bytes). Digests of different keys cannot be compared."""

    def __init__(self, key: bytes) -> None:
        self.rekey(key)

    def rekey(self, key: bytes) -> None:
        """Digest under another key from now on."""
        self._message = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"message")
        self._echo = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"echo")
        self._head = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"head")
        self._salt = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"salt")

    def shape(self, message: Mapping[str, Any]) -> MessageShape:
        """The shape of one message. Raises `NotAChatCall` if it has no role."""
        role = message.get("role")
        if not isinstance(role, str) or not is_label(role, MAX_LABEL_LENGTH):
            raise NotAChatCall("a message has no role")
        canonical = _canonical_message(message)
        digest = self._message.copy()
        digest.update(_encode(canonical))
        answers = message.get("tool_call_id")
        calls = canonical.get("tool_calls")
        return MessageShape(
            fact=MessageFact(digest.digest(), role),
            echo=self.echo(message) if role == "assistant" else b"",
            tool_call_ids=_call_ids(calls) if role == "assistant" else (),
            answers=answers if isinstance(answers, str) and role == "tool" else "",
        )

    def echo(self, message: Mapping[str, Any]) -> bytes:
        """Digest of what a client is sure to send back of an assistant message; empty if that is nothing."""
        canonical = _canonical_message(message)
        content = canonical.get("content")
        if isinstance(content, str):
            content = content.rpartition(_END_OF_THINKING)[2].strip()
        calls = canonical.get("tool_calls")
        functions = (
            [c.get("function") for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
        )
        if not content and not functions:
            return b""
        digest = self._echo.copy()
        digest.update(_encode([content or "", functions]))
        return digest.digest()

    def salt(self, tenant: str, chosen: str) -> str:
        """Cache salt for a tenant, and for a salt that its client chose: nobody else can name it."""
        digest = self._salt.copy()
        digest.update(_encode([tenant, chosen]))
        return digest.hexdigest()

    def head(self, document: Mapping[str, Any]) -> bytes:
        """Digest of everything but the messages that decides the prompt's beginning."""
        digest = self._head.copy()
        digest.update(
            _encode({name: document[name] for name in _HEAD_FIELDS if document.get(name) is not None})
        )
        return digest.digest()


def parse_chat_call(body: bytes, hasher: MessageHasher) -> ChatCall:
    """Read a body. Raises `NotAChatCall`. Takes some milliseconds a megabyte."""
    document = decode_body(body)
    if not isinstance(document, dict):
        raise NotAChatCall("the body is no JSON object")
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise NotAChatCall("the body has no list of messages")
    model, choices, options = document.get("model"), document.get("n"), document.get("stream_options")
    if model is not None and not (isinstance(model, str) and is_label(model, MAX_LABEL_LENGTH)):
        raise NotAChatCall("the model's name is no name")
    return ChatCall(
        document=document,
        model=model or "",
        messages=tuple(hasher.shape(message) for message in messages),
        head=hasher.head(document),
        stream=document.get("stream") is True,
        num_choices=choices
        if isinstance(choices, int) and not isinstance(choices, bool) and choices > 0
        else 1,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        wants_token_ids=document.get("return_token_ids") is True,
        lifecycle=document.get(LIFECYCLE_BODY_FIELD),
    )


async def read_chat_call(body: bytes, hasher: MessageHasher) -> ChatCall:
    """`parse_chat_call`, off the event loop for large bodies."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(parse_chat_call, body, hasher)
    return parse_chat_call(body, hasher)


def decode_body(body: bytes) -> object:
    """A body as engines read it, who take more than JSON. Raises `NotAChatCall`."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Engines read with Python's json, which takes more: NaN, lone surrogates, other encodings.
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise NotAChatCall("the body is no JSON") from error


def _canonical_message(message: Mapping[str, Any]) -> dict[str, Any]:
    canonical = {name: value for name, value in message.items() if value is not None and value != []}
    reasoning = canonical.pop("reasoning_content", None)
    if reasoning is not None:
        canonical.setdefault("reasoning", reasoning)
    content = canonical.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content) if len(content) == 1 else content
    if content in ("", None):
        canonical.pop("content", None)
    else:
        canonical["content"] = content
    calls = canonical.get("tool_calls")
    if isinstance(calls, list):
        canonical["tool_calls"] = [_canonical_call(call) for call in calls]
    return canonical


def _canonical_call(call: object) -> object:
    if not isinstance(call, dict):
        return call
    # `index` belongs to the stream the call came in; some clients send it back.
    canonical = {name: value for name, value in call.items() if value is not None and name != "index"}
    function = canonical.get("function")
    if isinstance(function, dict):
        canonical["function"] = {
            name: _arguments(value) if name == "arguments" else value
            for name, value in function.items()
            if value is not None
        }
    return canonical


def _arguments(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value
    return decoded if isinstance(decoded, dict) else value


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _call_ids(calls: object) -> tuple[str, ...]:
    entries: Sequence[object] = calls if isinstance(calls, list) else ()
    ids = (call.get("id") for call in entries if isinstance(call, dict))
    return tuple(entry for entry in ids if isinstance(entry, str) and entry)


def _encode(value: object) -> bytes:
    try:
        return msgspec.json.encode(value, order="sorted")
    except (ValueError, OverflowError, RecursionError, UnicodeError):
        # lone surrogates, integers of more than 64 bits, depth
        try:
            return json.dumps(value, sort_keys=True).encode()
        except (ValueError, RecursionError) as error:
            raise NotAChatCall("a message is nested too deeply") from error
