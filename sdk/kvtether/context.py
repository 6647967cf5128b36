"""A context: one ordered list of messages that an agent keeps, and what happens to it."""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from operator import index
from types import TracebackType
from typing import Any

from kvtether.arguments import (
    Result,
    Span,
    WaitKind,
    checked_result,
    checked_span,
    checked_wait,
    lease,
    number,
    seconds,
    wire_span,
)
from kvtether.client import Client, default_client
from kvtether.compaction import Compaction
from kvtether.ledger import Ledger, Operation
from kvtether.message_list import MessageList
from kvtether.names import (
    LIFECYCLE_BODY_FIELD,
    LIFECYCLE_HEADER,
    MAX_HEADER_BYTES,
    MAX_RIDING_BYTES,
    MIN_OPERATION_BYTES,
    context_id,
    label,
)
from kvtether.structured_fields import Token, dictionary

LINGER_SECONDS = 0.05
"""How long an operation waits for a call to ride on."""

FIRST_CALL_SECONDS = 0.25
"""How long operations wait for the answer to a context's first call: before it there is no context."""

_active: ContextVar[tuple["Context", ...]] = ContextVar("kvtether_active", default=())
_calls = count(1)


def current() -> "Context | None":
    """The context that is active in this thread or task, if there is one."""
    active = _active.get()
    return active[-1] if active else None


class Context:
    """One context of an agent, told to the proxy: edits as they happen, and whose every call is.

    Edits are told either by the list `messages`, whose operations they are, or by the methods here, which
    only tell. A context begins with its first call, which shows the list that it begins with. Spans are
    half-open indices into the list as it is. Nothing here waits or fails because of the proxy; what makes no
    sense raises `ValueError`. As a context manager, sync or async, it is active inside and closed at the end.
    Thread-safe.
    """

    def __init__(
        self, name: str | None = None, *, agent: str = "", flow: str = "", client: Client | None = None
    ) -> None:
        """`name` is unique among all contexts that use one key; without it one is made up."""
        self.name = context_id(name) if name else f"{label(agent) or 'ctx'}-{secrets.token_hex(6)}"
        self.name = context_id(self.name)
        self.agent = label(agent)
        self.flow = label(flow)
        self.client = client or default_client()
        self.parent = ""
        self.fork_at: int | None = None
        self.is_one_off = False
        self.length = 0
        """Messages of the list, as far as it was told."""
        self._ledger: Ledger = Ledger(self.name, self.client.queue)
        self._begun = False
        self._called = False
        self._closed = False
        self._early: list[Operation] = []
        self._forks: list[Ledger] = []
        self._messages: MessageList | None = None

    def __repr__(self) -> str:
        return f"Context({self.name!r})"

    @property
    def lock(self) -> threading.RLock:
        """Held while the list and what is told of it change together."""
        return self._ledger.lock

    @property
    def messages(self) -> MessageList:
        """The list: a plain one for everybody else, and every change of it is told."""
        with self._ledger.lock:
            if self._messages is None:
                self._messages = MessageList(self)
            return self._messages

    @property
    def keeps_list(self) -> bool:
        """Whether `messages` is in use, so that edits are told by it."""
        return self._messages is not None

    # -- edits --------------------------------------------------------------------------------------------

    def append(self, n: int = 1) -> None:
        """`n` messages were added at the end."""
        n = number(n)
        with self._ledger.lock:
            self.length += n
            if n and self._begun:
                self._record({"op": "append", "seq": 0, "ctx": self.name, "n": n})

    def replace(self, start: int, stop: int, n: int) -> None:
        """The messages `[start, stop)` gave way to `n` others; with `start == stop` these come between."""
        (start, stop), n = checked_span(start, stop), number(n)
        with self._ledger.lock:
            self.length += n - (stop - start)
            if self._begun and (n or start < stop):
                self._record({"op": "replace", "seq": 0, "ctx": self.name, "span": [start, stop], "n": n})

    def remove(self, start: int, stop: int) -> None:
        """The messages `[start, stop)` are gone."""
        start, stop = checked_span(start, stop)
        with self._ledger.lock:
            self.length -= stop - start
            if self._begun and start < stop:
                self._record({"op": "remove", "seq": 0, "ctx": self.name, "span": [start, stop]})

    # -- other contexts -----------------------------------------------------------------------------------

    def fork(self, upto: int | None = None, *, name: str | None = None, agent: str = "") -> "Context":
        """A context that begins with the first `upto` messages of this one, by default with all."""
        return self._fork(upto, name, agent, one_off=False)

    def _fork(self, upto: int | None, name: str | None, agent: str, one_off: bool) -> "Context":
        upto = None if upto is None else number(upto)
        with self._ledger.lock:
            child = self._child(name, agent, one_off)
            num = child.length = self.length if upto is None else min(upto, self.length)
            if self._messages is not None:
                child._messages = MessageList(child, self._messages[:num])
            if self._begun:  # else the proxy knows nothing yet to begin with
                child._begun, child.fork_at = True, num
                child._ledger.not_before = self._ledger.not_before
                operation = {"op": "fork", "seq": 0, "ctx": child.name, "parent": self.name, "upto": num}
                child._record(operation | child._labels())
                if one_off:
                    child._record({"op": "one_off", "seq": 0, "ctx": child.name})
                self._forks.append(child._ledger)
                self.client.kick()
            return child

    def spawn(self, *, name: str | None = None, agent: str = "") -> "Context":
        """A context of its own that works for this one."""
        return self._child(name, agent, one_off=False)

    def one_off(self, *, upto: int | None = None, name: str | None = None, agent: str = "") -> "Context":
        """A context for a single call: nothing of it is kept. With `upto` its list begins with that many
        messages of this one."""
        if upto is None:
            return self._child(name, agent, one_off=True)
        return self._fork(upto, name, agent, one_off=True)

    def _child(self, name: str | None, agent: str, one_off: bool) -> "Context":
        child = Context(name, agent=agent or self.agent, flow=self.flow, client=self.client)
        child.parent, child.is_one_off = self.name, one_off
        return child

    def _labels(self) -> dict[str, str]:
        labels = {"agent": self.agent, "flow": self.flow}
        return {key: text for key, text in labels.items() if text}

    # -- lifetime -----------------------------------------------------------------------------------------

    def pin(self, span: Span, ttl: float = 300.0, priority: int | None = None) -> None:
        """Hold everything up to the span's end for `ttl` seconds, an hour at most."""
        operation: Operation = {"op": "pin", "seq": 0, "ctx": self.name, "span": wire_span(span)}
        operation["ttl"] = lease(ttl)
        if priority is not None:
            operation["priority"] = index(priority)
        self._tell(operation)

    def unpin(self, span: Span) -> None:
        """Back to the ordinary state."""
        self._tell({"op": "unpin", "seq": 0, "ctx": self.name, "span": wire_span(span)})

    def waiting(self, kind: WaitKind, tool: str = "", eta: float | None = None) -> None:
        """What the agent waits for now, and for how many seconds it probably will."""
        operation: Operation = {"op": "waiting", "seq": 0, "ctx": self.name, "kind": checked_wait(kind)}
        if tool:
            operation["tool"] = label(tool)
        if eta is not None:
            operation["eta"] = seconds(eta)
        self._tell(operation)

    def resumed(self) -> None:
        """The wait is over; a call follows soon."""
        self._tell({"op": "resumed", "seq": 0, "ctx": self.name})

    def outcome(self, span: tuple[int, int], result: Result) -> None:
        """What became of the work that the span stands for."""
        if isinstance(span, str):
            raise ValueError("work is a span of messages")
        operation: Operation = {"op": "outcome", "seq": 0, "ctx": self.name, "span": wire_span(span)}
        operation["result"] = checked_result(result)
        self._tell(operation)

    def close(self) -> None:
        """The context is over: what nobody else needs of it is let go. A call opens it again."""
        with self._ledger.lock:
            if self._closed:
                return
            self._closed = True
            if self.is_one_off and self._called:
                return  # a one-off ends with its call
            self._tell({"op": "close", "seq": 0, "ctx": self.name})

    def compact(self, start: int, stop: int, *, upto: int | None = None, agent: str = "") -> Compaction:
        """Sum up the messages `[start, stop)` in a call of its own: a context manager, sync or async.

        With `upto` the summariser's prompt begins with that many messages of this list.
        """
        return Compaction(self, self.one_off(upto=upto, agent=agent), start, stop)

    # -- calls --------------------------------------------------------------------------------------------

    def headers(
        self,
        *,
        call: str = "",
        waiting: WaitKind | None = None,
        tool: str = "",
        eta: float | None = None,
        close: bool = False,
    ) -> dict[str, str]:
        """Headers for one call. Retries of it carry the same.

        `waiting`, `tool` and `eta` say what the agent will wait for after it; `close` ends the context with
        it. Operations that the proxy may not have yet are sent at once, by the way of their own.
        """
        headers, _ = self._for_call(False, call, waiting, tool, eta, close)
        return headers

    def call(
        self,
        *,
        call: str = "",
        waiting: WaitKind | None = None,
        tool: str = "",
        eta: float | None = None,
        close: bool = False,
    ) -> dict[str, Any]:
        """`extra_headers` and `extra_body` for one call of an OpenAI or Anthropic client whose base URL is
        the proxy's; see `headers`. The body is None unless a proxy was seen there and operations ride."""
        headers, body = self._for_call(True, call, waiting, tool, eta, close)
        return {"extra_headers": headers, "extra_body": body}

    def _for_call(
        self, riding: bool, call: str, waiting: WaitKind | None, tool: str, eta: float | None, close: bool
    ) -> tuple[dict[str, str], dict[str, Any] | None]:
        if waiting is not None:
            waiting = checked_wait(waiting)
        ledger = self._ledger
        with ledger.lock:
            first, self._begun, self._called = not self._begun, True, True
            self._closed = False
            source, seq, unsettled = ledger.before_call()
            if first:
                ledger.not_before = time.monotonic() + FIRST_CALL_SECONDS
                early, self._early = self._early, []
                for operation in early:
                    self._record(operation)
            # Nothing may overtake a fork that begins with what the list was before.
            self._forks = [fork for fork in self._forks if fork.opening]
            riding = riding and self.client.present and not self._forks
        call_id = call or f"{source}.{next(_calls)}"
        fields: dict[str, str | int | float | bool] = {"ctx": self.name, "call": call_id}
        if self.parent:
            fields["parent"] = self.parent
            if self.fork_at is not None:
                fields["fork_at"] = self.fork_at
        fields |= {key: True for key, said in (("one_off", self.is_one_off), ("close", close)) if said}
        if waiting is not None:
            fields["waiting"] = Token(waiting)
            fields |= {"tool": label(tool)} if tool else {}
            fields |= {"eta": seconds(eta)} if eta is not None else {}
        fields |= self._labels()
        body = None
        if unsettled:
            fields["source"] = source
            if riding and _fit(unsettled):
                self.client.rides(call_id, ledger, source, seq)
                body = {LIFECYCLE_BODY_FIELD: {**fields, "ops": unsettled}}
            else:  # the proxy waits for them, which it need not where none is on its way
                fields["seq"] = seq
                self.client.kick()
        return {LIFECYCLE_HEADER: _within_limit(fields)}, body

    def before_edit(self, start: int, stop: int, n: int = 0) -> int | None:
        """Tokens that would have to be prefilled again if `[start, stop)` gave way to `n` messages now.

        At most, and without those of the new messages. None if that is not known: no proxy, or no call yet.
        Asks the proxy, and waits for its answer a few seconds at most.
        """
        (start, stop), n = checked_span(start, stop), number(n)
        if start == stop and not n:
            return 0
        if not self._begun:
            return None
        operation: Operation = {"op": "remove", "seq": 1, "ctx": self.name, "span": [start, stop]}
        if n:
            operation |= {"op": "replace", "n": n}
        return self.client.cost(operation)

    async def abefore_edit(self, start: int, stop: int, n: int = 0) -> int | None:
        """`before_edit` for coroutines."""
        return await asyncio.to_thread(self.before_edit, start, stop, n)

    @contextmanager
    def active(self) -> Iterator["Context"]:
        """The context is the current one inside, for this thread or task."""
        _active.set((*_active.get(), self))
        try:
            yield self
        finally:
            _active.set(_active.get()[:-1])

    def activate(self) -> None:
        """The context is the current one from here on, in this thread or task: for a hook of a harness that
        runs where a call is made, but not around it."""
        _active.set((self,))

    def __enter__(self) -> "Context":
        _active.set((*_active.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.set(_active.get()[:-1])
        self.close()

    async def __aenter__(self) -> "Context":
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _record(self, operation: Operation) -> None:
        self._ledger.record(operation, LINGER_SECONDS)

    def _tell(self, operation: Operation) -> None:
        """What is no edit. Before the first call the proxy knows no context: pins wait for it, and nothing
        else makes sense."""
        with self._ledger.lock:
            if self._begun:
                self._record(operation)
            elif operation["op"] in ("pin", "unpin"):
                self._early.append(operation)


def _fit(operations: list[Operation]) -> bool:
    """Whether operations may ride on a call."""
    most = MAX_RIDING_BYTES // MIN_OPERATION_BYTES
    return len(operations) <= most and len(json.dumps(operations)) <= MAX_RIDING_BYTES


def _within_limit(fields: dict[str, str | int | float | bool]) -> str:
    """The header; labels are left out where it would be longer than the proxy reads."""
    value = dictionary(fields)
    if len(value) > MAX_HEADER_BYTES:
        value = dictionary({k: v for k, v in fields.items() if k not in ("agent", "flow", "tool")})
    return value
