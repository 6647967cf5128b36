"""From a request body to tokens: what is asked, and what the model will have said to it.

Names, limits and refusals are those of vLLM 0.32.0 (`entrypoints/openai/*/protocol.py`,
`renderers/params.py`).
"""

from __future__ import annotations

import json
import random
import secrets
from array import array
from typing import Any

import msgspec
from tokenizers.decoders import DecodeStream

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.sim.replies import (
    Asked,
    Reply,
    Script,
    ToolUse,
    chosen_text,
    hermes_calls,
    pseudo_ids,
    pseudo_length,
    pseudo_random,
)
from engine_bridge.sim.tokenizer import ChatTokenizer
from lifecycle.vocabulary import CACHE_SALT, KV_TRANSFER_PARAMS, MAX_OFFLOAD_TOKENS

MAX_CHOICES = 128


class Refused(Exception):
    """A request that the engine refuses. As vLLM does, a 400 names parameter and value behind its words."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, value: int | None = None
    ) -> None:
        if param is not None and status == 400:
            named = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
            message = f"{message} ({named})"
        super().__init__(message)
        self.param = param
        self.status = status
        self.kind = "NotFoundError" if status == 404 else "BadRequestError"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and how it is to be answered. `max_tokens` is what may and what can be generated.

    `chat` is None for a completion of plain text. `store_until` is the client's hint to LMCache.
    """

    prompt: array[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    seed: int | None = None
    salt: str = ""
    session_id: str | None = None
    store_until: int | None = None
    wants_cache_stats: bool = False
    chat: ChatPrompt | None = None
    body: dict[str, Any] = {}


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice says. `deltas[i]` is what a stream tells with token `i`, empty for nothing."""

    ids: array[int]
    text: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    stop_reason: str | None
    deltas: tuple[dict[str, Any], ...]


def read_chat(body: dict[str, Any], tokenizer: ChatTokenizer, max_model_len: int) -> Ask:
    """A chat completion's body. Raises `Refused`."""
    try:
        chat = ChatPrompt.from_body(body)
        prompt = tokenizer.prompt_ids(chat)
    except (RejectedByEngine, Unmappable) as error:
        raise Refused(str(error)) from error
    limit = body.get("max_completion_tokens")
    return _ask(body, prompt, limit if limit is not None else body.get("max_tokens"), max_model_len, chat)


def read_completion(body: dict[str, Any], tokenizer: ChatTokenizer, max_model_len: int) -> list[Ask]:
    """A completion's body, one ask a prompt. Raises `Refused`."""
    given = body.get("prompt")
    one = isinstance(given, str) or (isinstance(given, list) and all(_is_token(each) for each in given))
    prompts = [given] if one else given
    if not isinstance(prompts, list) or not prompts or prompts == [[]]:
        raise Refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    asks = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif isinstance(prompt, list) and all(_is_token(each) for each in prompt):
            ids = array("I", prompt)
        else:
            raise Refused("a prompt is a string or a list of token ids", "prompt")
        asks.append(_ask(body, ids, body.get("max_tokens", 16), max_model_len, None))
    return asks


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _ask(
    body: dict[str, Any], prompt: array[int], limit: Any, max_model_len: int, chat: ChatPrompt | None
) -> Ask:
    if len(prompt) >= max_model_len:
        raise Refused(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            value=len(prompt),
        )
    room = max_model_len - len(prompt)
    max_tokens = room if limit is None else _whole(limit, "max_tokens", 1)
    stop = body.get("stop") or ()
    salt, transfer = body.get(CACHE_SALT), body.get(KV_TRANSFER_PARAMS)
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise Refused("Parameter 'cache_salt' must be a non-empty string if provided.", CACHE_SALT)
    transfer = transfer if isinstance(transfer, dict) else {}
    store_until = transfer.get(MAX_OFFLOAD_TOKENS)
    session = body.get("session_id")
    seed = body.get("seed")
    return Ask(
        prompt=prompt,
        max_tokens=min(max_tokens, room),
        min_tokens=_whole(body.get("min_tokens") or 0, "min_tokens", 0),
        ignore_eos=body.get("ignore_eos") is True,
        stop=(stop,) if isinstance(stop, str) else tuple(str(each) for each in stop),
        num_choices=min(_whole(body.get("n") or 1, "n", 1), MAX_CHOICES),
        seed=seed if isinstance(seed, int) else None,
        salt=salt or "",
        session_id=session if isinstance(session, str) else None,
        store_until=None if store_until is None else _whole(store_until, MAX_OFFLOAD_TOKENS, 0),
        wants_cache_stats=bool(transfer.get("cached_token_stats")),
        chat=chat,
        body=body,
    )


def _whole(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{name} must be an integer, got {value!r}.", name)
    if value < least:
        raise Refused(f"{name} must be at least {least}, got {value}.", name, value=value)
    return value


class _Said(msgspec.Struct, frozen=True):
    """What the model wants to say, before any limit. `text` None: whatever the tokens read as."""

    ids: array[int]
    text: str | None
    tool_uses: tuple[ToolUse, ...]
    ends: bool


class Speaker:
    """Decides what is generated: a request's only choice, else the script's words, else pseudo-text."""

    def __init__(self, tokenizer: ChatTokenizer, script: Script | None = None) -> None:
        self._tokenizer = tokenizer
        self.script = script

    def generation(self, ask: Ask, choice: int) -> Generation:
        """Reply number `choice` of a request."""
        chance = pseudo_random(ask.prompt, choice, ask.seed)
        said = self._said(ask, chance)
        ids, text, uses, ends = said.ids, said.text, said.tool_uses, said.ends and not ask.ignore_eos
        least = max(1, ask.min_tokens)
        wanted = (ask.max_tokens if ask.ignore_eos else min(least, ask.max_tokens)) - ends
        if len(ids) < wanted:
            ids = ids + array("I", pseudo_ids(chance, self._tokenizer.words, wanted - len(ids)))
            text, uses = None, ()
        if ends:
            ids = ids + array("I", sorted(self._tokenizer.eos_ids)[:1])
        if len(ids) > ask.max_tokens:
            ids, text, uses, ends = ids[: ask.max_tokens], None, (), False
        uses = uses if ends else ()
        reason = "length" if not ends else "tool_calls" if uses else "stop"
        return self._spoken(ids, text, uses, reason, ask.stop)

    def _said(self, ask: Ask, chance: random.Random) -> _Said:
        only = chosen_text(ask.body)
        if only is not None:
            text, uses = hermes_calls(only) if ask.body.get("tools") else (only, ())
            return _Said(self._tokenizer.encode(only), text, uses, True)
        reply = self._scripted(ask) or Reply()
        ends = reply.finish_reason != "length"
        if ask.chat is not None and (reply.text is not None or reply.tool_calls):
            message = {
                "role": "assistant",
                "content": reply.text or "",
                "tool_calls": _calls(reply.tool_calls),
            }
            if not reply.tool_calls:
                del message["tool_calls"]
            ids = self._tokenizer.reply_ids(ask.chat, message)
            return _Said(ids, reply.text or "", reply.tool_calls, ends)
        count = reply.num_tokens or pseudo_length(chance, ask.max_tokens + 1, ask.min_tokens)
        words = pseudo_ids(chance, self._tokenizer.words, max(0, count - ends))
        return _Said(array("I", words), None, (), ends)

    def _scripted(self, ask: Ask) -> Reply | None:
        if self.script is None or ask.chat is None:
            return None
        return self.script(Asked(ask.chat.messages, ask.chat.tools or [], ask.body))

    def _spoken(
        self, ids: array[int], text: str | None, uses: tuple[ToolUse, ...], reason: str, stop: tuple[str, ...]
    ) -> Generation:
        """Token by token, until a stop string."""
        stream = DecodeStream(skip_special_tokens=True)
        backend = self._tokenizer.profile.tokenizer.backend
        deltas: list[dict[str, Any]] = []
        heard, stopped_by = "", None
        for number in ids:
            piece = stream.step(backend, number) or ""
            if text is not None:
                piece = piece[: max(0, len(text) - len(heard))]
            heard += piece
            stopped_by = next((each for each in stop if each and each in heard), None)
            if stopped_by is not None:
                piece = piece[: max(0, heard.index(stopped_by) - (len(heard) - len(piece)))]
                heard = heard[: heard.index(stopped_by)]
            deltas.append({"content": piece} if piece else {})
            if stopped_by is not None:
                ids, uses, reason = ids[: len(deltas)], (), "stop"
                break
        calls = tuple(_calls(uses))
        if calls:
            _tell_calls(deltas, calls, len(heard) > 0)
        return Generation(
            ids=ids,
            text=heard,
            tool_calls=calls,
            finish_reason=reason,
            stop_reason=stopped_by,
            deltas=tuple(deltas),
        )


def _calls(uses: tuple[ToolUse, ...]) -> list[dict[str, Any]]:
    """Tool calls as an answer and a message list carry them. Ids are fresh each time."""
    return [
        {
            "id": f"chatcmpl-tool-{secrets.token_hex(16)}",
            "type": "function",
            "function": {"name": use.name, "arguments": json.dumps(use.arguments, ensure_ascii=False)},
        }
        for use in uses
    ]


def _tell_calls(deltas: list[dict[str, Any]], calls: tuple[dict[str, Any], ...], has_text: bool) -> None:
    """Put the calls into the stream: names behind the text, arguments at the end."""
    first = 1 + max((at for at, delta in enumerate(deltas) if delta), default=-1) if has_text else 0
    first = min(first, len(deltas) - 1)
    names = [
        {"index": n, **call, "function": {**call["function"], "arguments": ""}}
        for n, call in enumerate(calls)
    ]
    arguments = [
        {"index": n, "function": {"arguments": call["function"]["arguments"]}} for n, call in enumerate(calls)
    ]
    deltas[first] = {**deltas[first], "tool_calls": names}
    last = deltas[-1]
    if "tool_calls" in last:
        deltas[-1] = {**last, "tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
    else:
        deltas[-1] = {**last, "tool_calls": arguments}
