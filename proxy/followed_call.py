"""An inference request that can be followed: whose it is, what its messages are, how its tokens are found.

Messages become keyed digests of a canonical form, so that two spellings of one message (key order, absent or
null fields, arguments as text or as an object) are one message, and nobody without the key can test a guess
of its text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from engine_bridge.mapping.normalise import BILLING_HEADER
from engine_bridge.mapping.responses import Item
from engine_bridge.mapping.service import Prompt
from lifecycle.core.ids import DIGEST_BYTES
from lifecycle.core.observations import MessageFact, PinRequest
from proxy.body_edit import SESSION_ID
from proxy.operations import MAX_LABEL_LENGTH, is_label

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

_MARKS = frozenset({"cache_control", "annotations", "id", "status"})
"""Members of messages and parts that say nothing to a model, and change while the message stays."""

_END_OF_THINKING = "</think>"

MARK_BYTES = 8
"""Length of the digest of a piece of text."""


class NotFollowed(Exception):
    """Why a body is no request that can be followed; it is forwarded all the same."""


class MessageShape(msgspec.Struct, frozen=True):
    """A message of the list: its fact, and what ties it to calls before.

    `echo` digests an assistant message as far as clients reproduce it: without reasoning, ids and outer
    whitespace; empty for other roles and for empty messages. `tool_call_ids` are the calls an assistant
    message makes, and the id of the response that a message begins or follows; `answers` is the id that a
    tool message answers.
    """

    fact: MessageFact
    echo: bytes = b""
    tool_call_ids: tuple[str, ...] = ()
    answers: str = ""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a later request may go on with by naming a response, and what this one goes on with.

    `items` as the engine takes them and their `shapes`; `size_bytes` of their texts. `follows` is the id of
    the response before, empty for none; `known` says that what it stands for is. `kept` says that the answer
    may be named by its id.
    """

    items: tuple[Item, ...] = ()
    shapes: tuple[MessageShape, ...] = ()
    size_bytes: int = 0
    follows: str = ""
    known: bool = True
    kept: bool = True


class FollowedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose prompt is a list of messages, whatever API it speaks.

    `document` is the whole decoded body; `head` digests what decides the prompt besides the messages.
    `prompt` tells how its tokens are found, or raises `Unmappable`. `lifecycle` is the decoded object of that
    name, None if there was none; `pins` are leases that the API's own fields ask for. `num_prompts` counts
    the prompts that share the request: each is followed as a call of its own. `wants_token_ids` says that the
    client reads the engine's token ids itself, `tells_token_ids` that the API has them at all. `label_field`
    is the member of the body by which the engine takes a session's label, empty for none. `size_bytes` is
    the whole body's, `normalised` names the normalisers that changed it. `conversation` is
    what the API keeps by its answers' ids, None if it keeps nothing. `compacts` says that the answer is to
    stand in place of the messages. `has_tools` says that the model may call tools, `system` digests the
    instructions that stand beside the list. `written` are the messages themselves, each as the chat messages
    that it becomes; those before the request's own, if there are any, are not among them.
    """

    document: Mapping[str, Any]
    model: str
    messages: tuple[MessageShape, ...]
    head: bytes
    prompt: Callable[[], Prompt]
    stream: bool = False
    num_choices: int = 1
    num_prompts: int = 1
    wants_token_ids: bool = False
    tells_token_ids: bool = True
    label_field: str = SESSION_ID
    size_bytes: int = 0
    normalised: tuple[str, ...] = ()
    pins: tuple[PinRequest, ...] = ()
    lifecycle: object = None
    conversation: Conversation | None = None
    compacts: bool = False
    has_tools: bool = False
    system: bytes = b""
    written: tuple[Sequence[Mapping[str, Any]], ...] = ()

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
        self._mark = blake2b(digest_size=MARK_BYTES, key=key, person=b"mark")

    def shape(self, message: Mapping[str, Any]) -> MessageShape:
        """The shape of one message. Raises `NotFollowed` if it has no role."""
        role = message.get("role")
        if not isinstance(role, str) or not is_label(role, MAX_LABEL_LENGTH):
            raise NotFollowed("a message has no role")
        canonical = _canonical_message(message)
        digest = self._message.copy()
        digest.update(_encode(canonical))
        answers = message.get("tool_call_id")
        calls = canonical.get("tool_calls")
        return MessageShape(
            fact=MessageFact(digest.digest(), role),
            echo=self._echo_of(canonical) if role == "assistant" else b"",
            tool_call_ids=_call_ids(calls) if role == "assistant" else (),
            answers=answers if isinstance(answers, str) and role == "tool" else "",
        )

    def echo(self, message: Mapping[str, Any]) -> bytes:
        """Digest of what a client is sure to send back of an assistant message; empty if that is nothing."""
        return self._echo_of(_canonical_message(message))

    def _echo_of(self, canonical: Mapping[str, Any]) -> bytes:
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

    def mark(self, piece: str) -> bytes:
        """Short digest of a piece of text, to find it again where it is quoted."""
        digest = self._mark.copy()
        digest.update(piece.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def salt(self, tenant: str, chosen: str) -> str:
        """Cache salt for a tenant, and for a salt that its client chose: nobody else can name it."""
        digest = self._salt.copy()
        digest.update(_encode([tenant, chosen]))
        return digest.hexdigest()

    def joined(self, role: str, parts: Sequence[Mapping[str, Any]]) -> MessageShape:
        """The shape of one client message that the engine takes for several chat messages, or for none."""
        shapes = [self.shape(part) for part in parts]
        if len(shapes) == 1 and shapes[0].fact.role == role:
            return shapes[0]
        digest = self._message.copy()
        digest.update(_encode([role, *(shape.fact.digest.hex() for shape in shapes)]))
        return MessageShape(
            fact=MessageFact(digest.digest(), role),
            answers=next((shape.answers for shape in shapes if shape.answers), ""),
        )

    def text(self, role: str, content: object) -> MessageShape:
        """The shape of a prompt that is one piece: text or token ids."""
        digest = self._message.copy()
        digest.update(_encode([role, content]))
        return MessageShape(fact=MessageFact(digest.digest(), role))

    def head(self, document: Mapping[str, Any]) -> bytes:
        """Digest of everything but the messages that decides the prompt's beginning."""
        return self.digest_of(
            {name: document[name] for name in _HEAD_FIELDS if document.get(name) is not None}
        )

    def digest_of(self, head: object) -> bytes:
        """Digest of a head that was picked by somebody who knows the API."""
        digest = self._head.copy()
        digest.update(_encode(head))
        return digest.digest()


def model_of(document: Mapping[str, Any]) -> str:
    """The model a body names, empty for the engine's own choice. Raises `NotFollowed`."""
    model = document.get("model")
    if model is not None and not (isinstance(model, str) and is_label(model, MAX_LABEL_LENGTH)):
        raise NotFollowed("the model's name is no name")
    return model or ""


def choices_of(document: Mapping[str, Any]) -> int:
    """How many answers to a prompt are asked for."""
    choices = document.get("n")
    return choices if isinstance(choices, int) and not isinstance(choices, bool) and choices > 0 else 1


def decode_body(body: bytes) -> object:
    """A body as engines read it, who take more than JSON. Raises `NotFollowed`."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Engines read with Python's json, which takes more: NaN, lone surrogates, other encodings.
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise NotFollowed("the body is no JSON") from error


def _canonical_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    is_plain = len(message) == 2 and "role" in message and isinstance(content, str)
    if is_plain and content and not content.startswith(BILLING_HEADER):
        return message  # as most are
    canonical = {
        name: value
        for name, value in message.items()
        if value is not None and value != [] and name not in _MARKS
    }
    reasoning = canonical.pop("reasoning_content", None)
    if reasoning is not None:
        canonical.setdefault("reasoning", reasoning)
    content = canonical.get("content")
    if isinstance(content, list):
        content = [_unmarked(part) for part in content]
        if len(content) == 1 and _is_text(content[0]):
            content = content[0]["text"]
    if canonical.get("role") == "system":
        content = _without_billing(content)
    if content in ("", None, []):
        canonical.pop("content", None)
    else:
        canonical["content"] = content
    calls = canonical.get("tool_calls")
    if isinstance(calls, list):
        canonical["tool_calls"] = [_canonical_call(call) for call in calls]
    return canonical


def _unmarked(part: Any) -> Any:
    if isinstance(part, dict) and not _MARKS.isdisjoint(part):
        return {name: value for name, value in part.items() if name not in _MARKS}
    return part


def _without_billing(content: Any) -> Any:
    """System content without the line by which Claude Code signs each conversation: engines drop it."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BILLING_HEADER) else content
    if isinstance(content, list) and any(
        _is_text(p) and p["text"].startswith(BILLING_HEADER) for p in content
    ):
        texts = [{**p, "text": _without_billing(p["text"])} if _is_text(p) else p for p in content]
        return [p for p in texts if not _is_text(p) or p["text"]]
    return content


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
            raise NotFollowed("a message is nested too deeply") from error
