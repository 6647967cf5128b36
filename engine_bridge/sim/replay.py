"""Plays the calls of a trace against an OpenAI-compatible server, over its socket, as their agent would.

Within a session calls go in order, sessions side by side. A message is text made for its id; an answer is
what the server really said: where a later list has a call's answer in it, it gets the text of that call, so
a chain that the engine generated goes on as it was generated. What happens to contexts is declared on the
calls themselves, or not at all. Edits are those between the lists as they were really sent; an answer is part
of the list it ended.

`python -m engine_bridge.sim.replay TRACE --base-url http://127.0.0.1:8700/v1 --model NAME`
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, groupby
from pathlib import Path
from typing import Annotated, Any, Protocol

import aiohttp
import msgspec
import typer

from engine_bridge.sim.traces.calls import Call, ChangeKind, Message, Role
from engine_bridge.sim.traces.generated import Workload, generated
from engine_bridge.sim.traces.reader import TraceFile
from engine_bridge.sim.traces.selection import Caps, capped
from engine_bridge.sim.traces.texts import Texts, counted_by, words_as_tokens
from lifecycle.vocabulary import LIFECYCLE_BODY_FIELD, WaitKind

ChatMessage = dict[str, str]

_ROLES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}
_WAITS = {WaitKind.TOOL, WaitKind.HUMAN}


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is played.

    `base_url` ends with the API's `/v1`. Context names begin with `name`: the same name again continues the
    same contexts. `time_scale` stretches the recorded gaps between calls; 0 leaves them out. `body` has
    further fields of every request.
    """

    base_url: str
    model: str
    name: str = "replay"
    declares: bool = True
    num_concurrent_sessions: int = 4
    time_scale: float = 0.0
    max_answer_tokens: int = 16
    api_key: str = "any"
    body: dict[str, Any] = {}
    idle_seconds: float = 300.0


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call. Token counts are the server's own; 0 where it did not tell.

    By the event loop's clock `ttft_seconds` runs from the request to the first generated text, `seconds` to
    the end. `declared` is what the request said of its context; `error` is empty for an answered call.
    """

    call: Call
    context_id: str
    declared: dict[str, Any]
    ttft_seconds: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    error: str = ""


Hear = Callable[[CallOutcome], None]


class Pace(Protocol):
    """Time as the agents live it: by default the event loop's."""

    def now_seconds(self) -> float: ...

    async def wait_until(self, at_seconds: float) -> None: ...

    def call(self) -> AbstractContextManager[None]:
        """Around each call, from the making of its list until its answer was read."""
        ...


class LoopPace:
    """The event loop's time."""

    def now_seconds(self) -> float:
        return _now()

    async def wait_until(self, at_seconds: float) -> None:
        await asyncio.sleep(max(at_seconds - _now(), 0.0))

    def call(self) -> AbstractContextManager[None]:
        return nullcontext()


async def replay(
    calls: Iterable[Call], texts: Texts, options: ReplayOptions, hear: Hear, pace: Pace | None = None
) -> None:
    """Play all calls; each outcome is told as soon as it is known. A failed call does not stop its session.

    `calls` is read as it is needed: the sessions that are being played are in memory, no others. The gaps
    between calls are waited by `pace`.
    """
    sessions = _sessions(calls)
    pace = pace or LoopPace()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.idle_seconds)
    headers = {"authorization": f"Bearer {options.api_key}"}

    async def work(http: aiohttp.ClientSession) -> None:
        for session in sessions:
            player = _Player(http, texts, options, hear, pace)
            for call in session:
                await player.play(call)

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(options.num_concurrent_sessions):
            group.create_task(work(http))


def _sessions(calls: Iterable[Call]) -> Iterator[list[Call]]:
    for _, session in groupby(calls, lambda call: call.session):
        yield list(session)


class _Player:
    """One session."""

    def __init__(
        self, http: aiohttp.ClientSession, texts: Texts, options: ReplayOptions, hear: Hear, pace: Pace
    ) -> None:
        self._pace = pace
        self._http = http
        self._texts = texts
        self._options = options
        self._hear = hear
        self._answers: dict[int, ChatMessage] = {}
        self._lists: dict[int, list[ChatMessage]] = {}
        self._ended_at: dict[int, float] = {}
        self._seqs: dict[int, count[int]] = {}

    async def play(self, call: Call) -> None:
        await self._gap(call)
        with self._pace.call():
            outcome = await self._ask(call)
        self._hear(outcome)

    async def _ask(self, call: Call) -> CallOutcome:
        messages = self._chat(call.messages)
        context_id = self._context_id(call, call.context)
        declared = self._declared(call, context_id, messages) if self._options.declares else {}
        exchange = _Exchange()
        body: dict[str, Any] = {
            "model": self._options.model,
            "messages": messages,
            "max_tokens": max(min(call.num_generated, self._options.max_answer_tokens), 1),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options.body,
        }
        if declared:
            body[LIFECYCLE_BODY_FIELD] = declared
        url = f"{self._options.base_url}/chat/completions"
        try:
            async with self._http.post(url, json=body) as response:
                await exchange.read(response)
        except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        self._ended_at[call.context] = self._pace.now_seconds()
        self._lists[call.context] = messages
        if not exchange.error:
            self._answers[call.index] = {"role": "assistant", "content": "".join(exchange.text)}
            self._lists[call.context] = [*messages, self._answers[call.index]]
        return exchange.outcome(call, context_id, declared)

    async def _gap(self, call: Call) -> None:
        ended = self._ended_at.get(call.context)
        if ended is None or call.gap_seconds is None or not self._options.time_scale:
            return
        due = ended + call.gap_seconds * self._options.time_scale
        await self._pace.wait_until(due)

    def _context_id(self, call: Call, context: int) -> str:
        return f"{self._options.name}:{call.session}.{context}"

    def _chat(self, messages: Sequence[Message]) -> list[ChatMessage]:
        """The list as it is sent. Tool definitions are a system message of their own: a template that puts
        `tools` elsewhere would make equal beginnings of two lists unequal."""
        chat: list[ChatMessage] = []
        spoken = False
        for message in messages:
            if message.answer_of in self._answers:
                chat.append(self._answers[message.answer_of])
                spoken = True
                continue
            spoken = spoken or message.role in (Role.USER, Role.ASSISTANT)
            content = self._texts.text(message)
            if message.role is Role.TOOL and spoken:
                chat.append({"role": "tool", "tool_call_id": f"call_{message.id}", "content": content})
            else:
                role = "system" if message.role is Role.TOOL else _ROLES[message.role]
                chat.append({"role": role, "content": content})
        return chat

    def _declared(self, call: Call, context_id: str, messages: Sequence[ChatMessage]) -> dict[str, Any]:
        fields: dict[str, Any] = {"ctx": context_id}
        old = self._lists.get(call.context)
        if old is None:
            self._seqs[call.context] = count(1)
            fields |= self._origin(call, messages)
        elif (kept := _shared(old, messages)) < len(old):
            edit = {"op": "remove", "seq": next(self._seqs[call.context]), "span": [kept, len(old)]}
            if len(messages) > kept:
                edit |= {"op": "replace", "n": len(messages) - kept}
            fields |= {"source": self._options.name, "ops": [edit]}
        if call.closes:
            return {**fields, "close": True}
        if call.waits_for in _WAITS:
            fields["waiting"] = call.waits_for
            if call.tools:
                fields["tool"] = call.tools[0]
        return fields

    def _origin(self, call: Call, messages: Sequence[ChatMessage]) -> dict[str, Any]:
        fields: dict[str, Any] = {"one_off": True} if call.is_one_off else {}
        theirs = self._lists.get(call.parent)
        if theirs is None:
            return fields
        fields["parent"] = self._context_id(call, call.parent)
        for change in call.before:
            if change.kind is ChangeKind.FORK:
                fields["fork_at"] = min(change.num_messages, _shared(theirs, messages))
        return fields


def _now() -> float:
    """Seconds of the event loop's clock, which in a simulated run is not the machine's."""
    return asyncio.get_running_loop().time()


def _shared(one: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


class _Exchange:
    """One streamed answer, as far as it came."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.error = ""
        self._usage: dict[str, Any] = {}
        self._began = _now()
        self._first = 0.0

    async def read(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            self.error = f"{response.status}: {(await response.text())[:300]}"
            return
        async for line in response.content:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                self._piece(msgspec.json.decode(line[6:]))

    def _piece(self, piece: dict[str, Any]) -> None:
        if "error" in piece:
            self.error = str(piece["error"])[:300]
        self._usage = piece.get("usage") or self._usage
        for choice in piece.get("choices", ()):
            delta = choice.get("delta", {})
            if choice.get("finish_reason") or any(delta.get(each) for each in delta if each != "role"):
                self._first = self._first or _now()
            self.text.append(delta.get("content") or "")

    def outcome(self, call: Call, context_id: str, declared: dict[str, Any]) -> CallOutcome:
        details = self._usage.get("prompt_tokens_details") or {}
        return CallOutcome(
            call=call,
            context_id=context_id,
            declared=declared,
            ttft_seconds=max(self._first - self._began, 0.0),
            seconds=_now() - self._began,
            prompt_tokens=self._usage.get("prompt_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            answer_tokens=self._usage.get("completion_tokens") or 0,
            error=self.error,
        )


def main(
    base_url: Annotated[str, typer.Option(help="The server's API, with /v1.")],
    model: Annotated[str, typer.Option(help="Model name of the requests.")],
    trace: Annotated[Path | None, typer.Argument(help="A trace; without one a workload is made up.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json that lengths are for.")] = None,
    declare: Annotated[bool, typer.Option(help="Say what happens to contexts.")] = True,
    calls: Annotated[int, typer.Option(help="Most calls in all.")] = 300,
    session_calls: Annotated[int, typer.Option(help="Most calls of a session.")] = 1_000_000,
    list_tokens: Annotated[int, typer.Option(help="Longest list; messages beyond are dropped.")] = 24_000,
    new_tokens: Annotated[int, typer.Option(help="Most tokens not sent before, in all.")] = 2_000_000,
    answer_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 16,
    concurrent: Annotated[int, typer.Option(help="Sessions side by side.")] = 4,
    time_scale: Annotated[float, typer.Option(help="Recorded gaps are waited this often; 0: never.")] = 0.0,
    name: Annotated[str, typer.Option(help="Contexts begin with it, and texts depend on it.")] = "replay",
) -> None:
    """Play a trace against an OpenAI-compatible server, a line a call."""
    texts = Texts(counted_by(tokenizer) if tokenizer else words_as_tokens, salt=name)
    caps = Caps(
        num_session_calls=session_calls,
        num_calls=calls,
        num_list_tokens=list_tokens,
        num_new_tokens=new_tokens,
        num_answer_tokens=answer_tokens,
    )
    options = ReplayOptions(
        base_url=base_url.rstrip("/"),
        model=model,
        name=name,
        declares=declare,
        num_concurrent_sessions=concurrent,
        time_scale=time_scale,
        max_answer_tokens=answer_tokens,
    )
    source: Iterable[Call] = TraceFile(trace) if trace else generated(Workload())
    asyncio.run(replay(capped(source, caps), texts, options, lambda told: typer.echo(_line(told))))


def _line(told: CallOutcome) -> str:
    if told.error:
        return f"{told.context_id:<20} {told.error}"
    said = " ".join(key for key in told.declared if key not in ("ctx", "source"))
    return (
        f"{told.context_id:<20} prompt {told.prompt_tokens:>6} cached {told.cached_tokens:>6} "
        f"first token {1000 * told.ttft_seconds:>7.1f} ms  {said}"
    )


if __name__ == "__main__":
    typer.run(main)
