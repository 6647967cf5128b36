"""Whatever an agent may say, the proxy can read; what it cannot mean is said at once."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtether import Client, Context
from kvtether.arguments import RESULTS, WAIT_KINDS, number, seconds
from lifecycle.vocabulary import OutcomeResult
from proxy.operations import DECLARABLE_WAITS, OperationProblem, parse_operation_list

SPANS = st.one_of(
    st.tuples(st.integers(-2, 9), st.integers(-2, 9)), st.sampled_from(["system", "tools", "head", ""])
)
NUMBERS = st.integers(-2, 9)
SECONDS = st.one_of(st.floats(), st.integers(-2, 10**12))
WORDS = st.one_of(st.text(max_size=300), st.sampled_from([*WAIT_KINDS, *RESULTS]))
SAID = st.one_of(
    st.tuples(st.just("append"), NUMBERS),
    st.tuples(st.just("replace"), NUMBERS, NUMBERS, NUMBERS),
    st.tuples(st.just("remove"), NUMBERS, NUMBERS),
    st.tuples(st.just("pin"), SPANS, SECONDS, NUMBERS),
    st.tuples(st.just("unpin"), SPANS),
    st.tuples(st.just("waiting"), WORDS, WORDS, SECONDS),
    st.tuples(st.just("outcome"), SPANS, WORDS),
    st.tuples(st.just("fork"), NUMBERS),
)


class Said(Context):
    """A context that keeps what it would send."""

    def __init__(self) -> None:
        super().__init__("c", client=Client())
        self.operations: list[dict[str, object]] = []
        self.headers()

    def _record(self, operation):
        self.operations.append({**operation, "seq": len(self.operations) + 1})


@given(st.lists(SAID, max_size=8))
def test_whatever_is_not_refused_the_proxy_reads(said):
    context = Said()
    for name, *arguments in said:
        with contextlib.suppress(ValueError):
            getattr(context, name)(*arguments)
    read = parse_operation_list(context.operations)
    assert [each for each in read if isinstance(each, OperationProblem)] == []


def test_what_can_be_waited_for_and_come_of_is_the_proxys():
    assert set(WAIT_KINDS) == DECLARABLE_WAITS
    assert set(RESULTS) == set(OutcomeResult)


def test_numbers_may_be_anybodys():
    assert type(number(np.int64(3))) is int
    assert type(seconds(np.float32(0.5))) is float
    assert seconds(math.inf) < math.inf


@pytest.mark.parametrize("n", [1.0, "1", None])
def test_what_is_no_number_is_no_number(n):
    with pytest.raises(TypeError):
        number(n)
