"""A finding is a fact of its context's stream like any other, and costs few bytes."""

from typing import get_args

from lifecycle.core.events import ContextEvent, PrefixDiverged
from lifecycle.store.codec import decode, encode
from lifecycle.vocabulary import PrefixBreak


def test_it_goes_through_the_log_as_it_is() -> None:
    assert PrefixDiverged in get_args(ContextEvent)
    for kind in PrefixBreak:
        event = PrefixDiverged(at_ns=1, call_id="c", attempt=1, kind=kind, index=-1, lost_tokens=256)
        assert decode(encode(event)) == event
        assert len(encode(event)) < 150
