"""Somebody listens to a call's answer; whatever goes wrong with the listening, the answer goes on."""

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from lifecycle.vocabulary import CallEnd
from proxy.answer_facts import AnswerFacts
from proxy.answer_tap import AnswerTap
from proxy.engine_connection import Headers

logger = logging.getLogger(__name__)


class CallObserver(Protocol):
    """Listens to one call. Its methods must return at once; what they raise is logged and harms no answer."""

    def on_head(self, status: int) -> None:
        """The engine's answer begins."""
        ...

    def on_first_token(self) -> None:
        """A streamed answer carries its first generated piece: the prompt has been computed."""
        ...

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        """The call is over; called exactly once, and before anything is read that a client sends after it
        has read the whole answer.

        `reason` is empty for COMPLETED, and in our words. An answer that is an error is FAILED.
        """
        ...


class ForwardOutcome(msgspec.Struct, frozen=True):
    """How an exchange ended. `status` is the engine's, 0 if it gave none."""

    end: CallEnd
    status: int
    reason: str = ""


class ContentHeaders:
    """What an answer says about its body."""

    def __init__(self, headers: Headers) -> None:
        found = dict(headers)
        self.type = found.get(b"content-type", b"").decode("latin-1").strip().lower()
        self.encoding = found.get(b"content-encoding", b"").decode("latin-1").strip().lower()


class CallListener:
    """The observer, if there is one, and its tap, fenced off: whatever they raise ends the listening, never
    the answer."""

    def __init__(self, observer: CallObserver | None = None) -> None:
        self.outcome: ForwardOutcome | None = None
        self.observer = observer
        self._tap: AnswerTap | None = None
        self._status = 0
        self._first_token_told = False

    def head(self, status: int, content: ContentHeaders) -> None:
        self._status = status
        if self.observer is None:
            return
        self._tap = AnswerTap(status, content.type, content.encoding)
        self._guarded(lambda observer: observer.on_head(status))

    def heard(self, piece: bytes) -> None:
        if self._tap is None or self.outcome is not None:
            return
        try:
            self._tap.feed(piece)
        except Exception:
            logger.exception("the tap failed; the rest of this answer goes unread")
            self._tap = None
            return
        if self._tap.first_token and not self._first_token_told:
            self._first_token_told = True
            self._guarded(lambda observer: observer.on_first_token())
        if self._tap.finished:
            self._complete_as_told()

    def complete(self) -> None:
        """The body ended as HTTP says it should."""
        if self.outcome is None:
            if self._tap is not None:
                try:
                    self._tap.close()
                except Exception:
                    logger.exception("the tap failed at the end of an answer")
            self._complete_as_told()

    def end(self, end: CallEnd, reason: str) -> None:
        """The exchange is over; only the first word counts."""
        if self.outcome is not None:
            return
        self.outcome = ForwardOutcome(end, self._status, reason)
        facts = self._tap.facts() if self._tap is not None else AnswerFacts(status=self._status)
        self._guarded(lambda observer: observer.on_end(end, facts, reason))

    def _complete_as_told(self) -> None:
        # In our words: what an engine says of a bad request may quote the prompt, and reasons are recorded.
        if self._status >= 400:
            self.end(CallEnd.FAILED, f"the engine answered {self._status}")
        elif self._tap is not None and self._tap.facts().error:
            self.end(CallEnd.FAILED, "the engine's answer says that it failed")
        else:
            self.end(CallEnd.COMPLETED, "")

    def _guarded(self, tell: Callable[[CallObserver], None]) -> None:
        if self.observer is None:
            return
        try:
            tell(self.observer)
        except Exception:
            logger.exception("an observer failed")
