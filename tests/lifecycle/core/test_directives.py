"""Directives keep their kind and content through a log."""

import msgspec
import pytest

from lifecycle.core.directives import Admit, Demote, Directive, Pin, Reclaim, Unpin
from lifecycle.core.ids import Namespace

COMMON = {"directive_id": "d1", "namespace": Namespace("model", "salt"), "reason": "why"}


@pytest.mark.parametrize(
    "directive",
    [
        Admit(**COMMON, call_id="c1", bypass_from_token=256),
        Reclaim(**COMMON, keys=b"k" * 64),
        Demote(**COMMON, keys=b"k" * 32),
        Pin(**COMMON, pin_id="p1", keys=b"k" * 32, lease_until_ns=10**18),
        Unpin(**COMMON, pin_id="p1", keys=b"k" * 32),
    ],
    ids=lambda d: type(d).__name__,
)
def test_a_directive_comes_back_as_what_it_was(directive: Directive) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(directive), type=Directive) == directive
