"""What is known of the request under way, for whoever writes about it: logs, metrics and traces.

One record a request, in a context variable: everything that a request starts, tasks and timers included,
finds its own. Nothing in it is text of a message.
"""

import re
import time
from contextvars import ContextVar
from typing import Any

from lifecycle.vocabulary import CallEnd, MappingKind
from proxy.answer_facts import AnswerFacts, Usage
from proxy.call_listener import CallObserver, ForwardOutcome
from proxy.engine_connection import Headers

REQUEST_ID_HEADER = b"x-request-id"

REFUSED = "refused"
"""The outcome of a request that we did not forward; the others are those of a call."""

UNEXPECTED = "unexpected"
"""The outcome of a request that nobody answered to its end for a reason that nobody foresaw."""

_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestRecord:
    """One request. Times are `time.perf_counter()` seconds, 0 for what has not happened.

    `outcome` is empty while it is under way; `status` is what the client was answered, 0 for nothing;
    `reason` is in words of ours, never the engine's, for those may quote the prompt. `speaks` says that
    headers of ours go with the engine's answer. `backend` is the one of several engines that took it, or was
    tried last; empty with one engine. `span` and `exchange_span` belong to the tracer.
    """

    __slots__ = (
        "backend",
        "began",
        "cached_tokens",
        "call",
        "context",
        "engine_id",
        "engine_status",
        "exchange_span",
        "finish_reasons",
        "first_byte",
        "first_token",
        "held_seconds",
        "id",
        "input_tokens",
        "mapping",
        "method",
        "mode",
        "model",
        "normalised",
        "outcome",
        "output_tokens",
        "path",
        "reason",
        "response_model",
        "sent",
        "span",
        "speaks",
        "status",
        "streamed",
        "tenant",
    )

    def __init__(self, request_id: str, method: str = "", path: str = "") -> None:
        self.id = request_id
        self.method = method
        self.path = path
        self.began = time.perf_counter()
        self.sent = 0.0
        self.first_byte = 0.0
        self.first_token = 0.0
        self.held_seconds = 0.0
        self.tenant = ""
        self.model = ""
        self.mode = ""
        self.streamed = False
        self.context = ""
        self.call = ""
        self.mapping: MappingKind | None = None
        self.normalised: tuple[str, ...] = ()
        self.speaks = False
        self.backend = ""
        self.engine_status = 0
        self.engine_id = ""
        self.response_model = ""
        self.finish_reasons: tuple[str, ...] = ()
        self.input_tokens = -1
        self.output_tokens = -1
        self.cached_tokens = -1
        self.status = 0
        self.outcome = ""
        self.reason = ""
        self.span: Any = None
        self.exchange_span: Any = None

    def listening(self, observer: CallObserver | None) -> CallObserver | None:
        """The observer, with this record told beside it; None for none: then the answer is not read."""
        return None if observer is None else _Beside(self, observer)

    def ended(self, outcome: ForwardOutcome) -> None:
        """The exchange with the engine is over."""
        self.outcome, self.engine_status, self.reason = outcome.end.value, outcome.status, outcome.reason

    def asks_for(self, model: str) -> None:
        """The model by the client's word: any text, so half a surrogate pair is replaced."""
        self.model = model.encode("utf-8", "replace").decode()

    def gave_up(self, outcome: str, reason: str) -> None:
        """It was not forwarded, or the client went before it was."""
        self.outcome, self.reason = str(outcome), reason

    def learn(self, facts: AnswerFacts) -> None:
        """What the answer said of itself."""
        usage: Usage = facts.usage
        self.input_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
        self.cached_tokens = -1 if usage.cached_tokens is None else usage.cached_tokens
        self.engine_id, self.response_model = facts.response_id, facts.model
        self.finish_reasons = tuple(c.finish_reason for c in facts.choices if c.finish_reason)


_current: ContextVar[RequestRecord | None] = ContextVar("request", default=None)


def current_request() -> RequestRecord | None:
    """The request that this code runs for."""
    return _current.get()


def run_for(record: RequestRecord | None) -> None:
    """From here on this task, and what it starts, runs for that request, or for none."""
    _current.set(record)


def the_request() -> RequestRecord:
    """The request that this code runs for; one that nobody reads where there is none."""
    return _current.get() or RequestRecord("")


def given_id(headers: Headers) -> str:
    """The id that the client gave its request; empty for none, two, or one that is not well-formed."""
    given = [value for name, value in headers if name == REQUEST_ID_HEADER]
    return given[0].decode() if len(given) == 1 and _WELL_FORMED.fullmatch(given[0]) else ""


class _Beside:
    """An observer and the record. Satisfies `CallObserver`."""

    def __init__(self, record: RequestRecord, observer: CallObserver) -> None:
        self._record = record
        self._observer = observer

    def on_head(self, status: int) -> None:
        self._observer.on_head(status)

    def on_first_token(self) -> None:
        self._record.first_token = time.perf_counter()
        self._observer.on_first_token()

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        self._record.learn(facts)
        self._observer.on_end(end, facts, reason)
