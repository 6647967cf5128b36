"""What is known of a request: its id, how it ended, and nothing of what anybody wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.vocabulary import CallEnd
from proxy.answer_tap import AnswerFacts
from proxy.call_listener import ForwardOutcome
from proxy.request_record import RequestRecord, current_request, given_id, run_for, the_request


@given(st.binary(max_size=200))
def test_an_id_is_taken_over_only_if_it_cannot_be_mistaken_in_a_log(value: bytes) -> None:
    taken = given_id([(b"host", b"h"), (b"x-request-id", value)])
    assert taken.encode() in (value, b"")
    assert not taken or (taken.isascii() and taken.isprintable() and len(taken) <= 128)
    assert not {*taken} & {*" \t\r\n\"'\\{}"}


@pytest.mark.parametrize("value", [b"a", b"req_0-9.A:b/c+d=@", b"x" * 128])
def test_the_ids_that_programs_make_are_taken_over(value: bytes) -> None:
    assert given_id([(b"x-request-id", value)]) == value.decode()


def test_two_ids_are_none() -> None:
    assert given_id([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) == ""
    assert given_id([]) == ""


@pytest.mark.parametrize(
    ("outcome", "ended", "reason"),
    [
        (ForwardOutcome(CallEnd.COMPLETED, 200), "completed", ""),
        (ForwardOutcome(CallEnd.COMPLETED, 404), "failed", "the engine answered 404"),
        (ForwardOutcome(CallEnd.FAILED, 400, "you wrote 'secret'"), "failed", "the engine answered 400"),
        (ForwardOutcome(CallEnd.FAILED, 0, "cannot connect"), "failed", "cannot connect"),
        (ForwardOutcome(CallEnd.ABORTED, 200, "the client hung up"), "aborted", "the client hung up"),
    ],
)
def test_how_it_ended_is_told_in_our_words(outcome: ForwardOutcome, ended: str, reason: str) -> None:
    record = RequestRecord("r")
    record.ended(outcome)
    assert (record.outcome, record.reason) == (ended, reason)


def test_an_error_within_an_answer_is_not_quoted() -> None:
    record = RequestRecord("r")
    record.learn(AnswerFacts(status=200, error="you wrote 'secret'"))
    record.ended(ForwardOutcome(CallEnd.FAILED, 200, "you wrote 'secret'"))
    assert record.reason == "the engine's answer says that it failed"


def test_code_outside_of_a_request_has_a_record_that_nobody_reads() -> None:
    assert current_request() is None
    the_request().tenant = "t"
    assert the_request().tenant == ""
    record = RequestRecord("r")
    run_for(record)
    assert the_request() is current_request() is record
    run_for(None)
