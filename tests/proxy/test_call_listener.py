"""An observer hears each thing once and in order, and cannot do harm."""

import json

import pytest

from lifecycle.vocabulary import CallEnd
from proxy.answer_tap import AnswerFacts
from proxy.call_listener import CallListener, ContentHeaders
from tests.proxy.scripted_upstream import DONE, chat_answer, chat_chunks, sse

STREAM = ContentHeaders([(b"content-type", b"text/event-stream; charset=utf-8")])
JSON = ContentHeaders([(b"content-type", b"application/json")])


class Notes:
    def __init__(self, fails: bool = False) -> None:
        self.told: list[str] = []
        self.facts: AnswerFacts | None = None
        self.fails = fails

    def on_head(self, status: int) -> None:
        self._note(f"head {status}")

    def on_first_token(self) -> None:
        self._note("first token")

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        self.facts = facts
        self._note(f"{end.value}: {reason}")

    def _note(self, what: str) -> None:
        self.told.append(what)
        if self.fails:
            raise RuntimeError(what)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_is_told_in_order_and_its_end_once(fails: bool) -> None:
    notes = Notes(fails)
    listener = CallListener(notes)
    listener.head(200, STREAM)
    for chunk in chat_chunks(["a", "b"]):
        listener.heard(chunk)
    assert notes.told == ["head 200", "first token", "completed: "]
    listener.heard(DONE)
    listener.complete()
    listener.end(CallEnd.ABORTED, "late")
    assert len(notes.told) == 3
    assert listener.outcome is not None
    assert listener.outcome.end is CallEnd.COMPLETED


def test_a_whole_answer_ends_with_its_body() -> None:
    notes = Notes()
    listener = CallListener(notes)
    listener.head(200, JSON)
    listener.heard(json.dumps(chat_answer("x")).encode())
    assert notes.told == ["head 200"]
    listener.complete()
    assert notes.told == ["head 200", "completed: "]


@pytest.mark.parametrize(
    ("status", "content", "body", "reason"),
    [
        (500, JSON, b"oops", "the engine answered 500"),
        (400, JSON, b'{"error":{"message":"bad"}}', "the engine answered 400"),
        (400, JSON, b'{"object":"error","message":"bad"}', "the engine answered 400"),
        (
            200,
            STREAM,
            sse({"error": {"message": "mid-stream"}}) + DONE,
            "the engine's answer says that it failed",
        ),
    ],
)
def test_an_answer_that_is_an_error_has_failed(
    status: int, content: ContentHeaders, body: bytes, reason: str
) -> None:
    notes = Notes()
    listener = CallListener(notes)
    listener.head(status, content)
    listener.heard(body)
    listener.complete()
    assert notes.told[-1] == f"failed: {reason}"


def test_what_was_heard_of_a_broken_answer_is_told() -> None:
    notes = Notes()
    listener = CallListener(notes)
    listener.head(200, STREAM)
    listener.heard(chat_chunks(["a"])[1])
    listener.end(CallEnd.FAILED, "reset")
    assert notes.told[-1] == "failed: reset"
    assert notes.facts is not None
    assert notes.facts.choices[0].content == "a"
    assert not notes.facts.complete


def test_without_an_observer_only_the_outcome_is_kept() -> None:
    listener = CallListener(None)
    listener.head(200, STREAM)
    listener.heard(b"data: x\n\n")
    listener.complete()
    assert listener.outcome is not None
    assert (listener.outcome.end, listener.outcome.status) == (CallEnd.COMPLETED, 200)
