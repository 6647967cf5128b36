"""What is known of a request: its id, how it ended, and nothing of what anybody wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.vocabulary import CallEnd
from proxy.answer_tap import AnswerFacts, Usage
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


def test_how_it_ended_and_what_its_answer_said_are_kept() -> None:
    record = RequestRecord("r")
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    record.learn(AnswerFacts(status=200, error="you wrote 'secret'", usage=usage, response_id="x"))
    record.ended(ForwardOutcome(CallEnd.FAILED, 200, "the engine's answer says that it failed"))
    assert (record.outcome, record.engine_status) == ("failed", 200)
    assert (record.input_tokens, record.cached_tokens, record.engine_id) == (3, -1, "x")
    kept = [str(getattr(record, name)) for name in RequestRecord.__slots__]
    assert not [text for text in kept if "secret" in text]


def test_code_outside_of_a_request_has_a_record_that_nobody_reads() -> None:
    assert current_request() is None
    the_request().tenant = "t"
    assert the_request().tenant == ""
    record = RequestRecord("r")
    run_for(record)
    assert the_request() is current_request() is record
    run_for(None)
