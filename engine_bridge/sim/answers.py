"""Answers of the embedded engine on the wire, whole or streamed, with vLLM's fields.

A client that hangs up ends its requests: that is watched for from the first byte to the last.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

import msgspec

from engine_bridge.sim.generation import Ask, Generation
from engine_bridge.sim.requests import AbortedOutput, FinishedOutput, SimRequest, TokenOutput, Usage
from engine_bridge.sim.runner import EngineRunner

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

Tell: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"


class EngineFailed(Exception):
    """The engine ended a request by itself; the message says why."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to generate. `index` counts within the answer, `ask` is what it answers."""

    index: int
    ask: Ask
    said: Generation
    request: SimRequest


class Form(Protocol):
    """How an API writes an answer."""

    kind: str
    piece_kind: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice of a whole answer."""
        ...

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first event of a choice, before any token; None for none."""
        ...

    def piece(self, choice: Choice, at: int) -> dict[str, Any] | None:
        """What a stream tells with token `at`; None for nothing."""
        ...


class ChatForm:
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    piece_kind = "chat.completion.chunk"

    def whole(self, choice: Choice) -> dict[str, Any]:
        said = choice.said
        message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
        if said.tool_calls:
            message["tool_calls"] = list(said.tool_calls)
        elif not said.text:
            message["content"] = ""
        return _choice(choice, {"message": message}, said.ids.tolist(), ended=True)

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        opening = _choice(choice, {"delta": {"role": "assistant", "content": ""}}, None, ended=False)
        if choice.ask.body.get("return_token_ids"):
            return {"choices": [opening], "prompt_token_ids": choice.ask.prompt.tolist()}
        return {"choices": [opening]}

    def piece(self, choice: Choice, at: int) -> dict[str, Any] | None:
        delta, is_last = choice.said.deltas[at], at == len(choice.said.ids) - 1
        if not delta and not is_last and not choice.ask.body.get("return_token_ids"):
            return None
        return {"choices": [_choice(choice, {"delta": delta}, [choice.said.ids[at]], ended=is_last)]}


class TextForm:
    """`/v1/completions`."""

    kind = "text_completion"
    piece_kind = "text_completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        written = _choice(choice, {"text": choice.said.text}, choice.said.ids.tolist(), ended=True)
        if choice.ask.body.get("return_token_ids"):
            written["prompt_token_ids"] = choice.ask.prompt.tolist()
        return written

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return None

    def piece(self, choice: Choice, at: int) -> dict[str, Any] | None:
        text = choice.said.deltas[at].get("content", "")
        is_last = at == len(choice.said.ids) - 1
        if not text and not is_last and not choice.ask.body.get("return_token_ids"):
            return None
        return {"choices": [_choice(choice, {"text": text}, [choice.said.ids[at]], ended=is_last)]}


def _choice(choice: Choice, told: dict[str, Any], ids: list[int] | None, *, ended: bool) -> dict[str, Any]:
    written = {"index": choice.index, **told, "logprobs": None, "finish_reason": None}
    if ended:
        written |= {"finish_reason": choice.said.finish_reason, "stop_reason": choice.said.stop_reason}
    if ids is not None and choice.ask.body.get("return_token_ids"):
        written["token_ids"] = ids
    return written


def usage_of(choices: Sequence[Choice], usages: Mapping[int, Usage]) -> dict[str, Any]:
    """Token counts of an answer: each prompt once, everything generated."""
    prompts = {id(choice.ask): choice for choice in reversed(choices)}
    prompt_tokens = sum(len(choice.ask.prompt) for choice in prompts.values())
    generated = sum(usage.completion_tokens for usage in usages.values())
    cached = sum(usages[c.index].cached_tokens for c in prompts.values() if c.index in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Answer:
    """One answer, as an ASGI application. `extra` stands at the top of a whole answer."""

    def __init__(
        self,
        runner: EngineRunner,
        form: Form,
        choices: Sequence[Choice],
        head: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        self._runner = runner
        self._form = form
        self._choices = choices
        self._head = {**head, "object": form.kind}
        self._extra = extra
        self._body = choices[0].ask.body
        self._usages: dict[int, Usage] = {}

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._body.get("stream") else self._whole(send)
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(work)
            watching = tasks.create_task(_hung_up(receive))
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            watching.cancel()

    async def _whole(self, send: Send) -> None:
        try:
            await self._generate_all(None)
        except EngineFailed as error:
            await send_json(send, 500, error_document(str(error), "InternalServerError", 500))
            return
        document = {
            **self._head,
            "choices": [self._form.whole(choice) for choice in self._choices],
            "usage": usage_of(self._choices, self._usages),
            **self._extra,
        }
        await send_json(send, 200, document)

    async def _stream(self, send: Send) -> None:
        async def tell(document: Mapping[str, Any]) -> None:
            event = b"data: " + msgspec.json.encode(document) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})

        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        head = {**self._head, "object": self._form.piece_kind}

        async def tell_piece(piece: Mapping[str, Any]) -> None:
            await tell({**head, **piece})

        try:
            await self._generate_all(tell_piece)
            if (self._body.get("stream_options") or {}).get("include_usage"):
                await tell_piece({"choices": [], "usage": usage_of(self._choices, self._usages)})
        except EngineFailed as error:
            await tell(error_document(str(error), "InternalServerError", 500))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _generate_all(self, tell: Tell | None) -> None:
        """Run every choice to its end. Raises `EngineFailed`."""
        failures: list[EngineFailed] = []

        async def run(choice: Choice) -> None:
            try:
                await self._generate(choice, tell)
            except EngineFailed as error:
                failures.append(error)

        async with asyncio.TaskGroup() as tasks:
            for choice in self._choices:
                tasks.create_task(run(choice))
        if failures:
            raise failures[0]

    async def _generate(self, choice: Choice, tell: Tell | None) -> None:
        # Closed at once when the client is gone: only then the engine stops.
        async with aclosing(self._runner.generate(choice.request)) as outputs:
            async for output in outputs:
                match output:
                    case TokenOutput(index=at):
                        if tell is None:
                            continue
                        opening = self._form.opening(choice) if at == 0 else None
                        for piece in (opening, self._form.piece(choice, at)):
                            if piece is not None:
                                await tell(piece)
                    case FinishedOutput(usage=usage):
                        self._usages[choice.index] = usage
                    case AbortedOutput(reason=reason):
                        raise EngineFailed(reason)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_document(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """An error as vLLM shapes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def send_json(send: Send, status: int, document: object) -> None:
    """A whole answer."""
    body = msgspec.json.encode(document)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def new_id(kind: str) -> str:
    """An answer's id, also that of its requests."""
    return f"{kind}-{secrets.token_hex(16)}"
