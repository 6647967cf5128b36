"""Canonical digests: one value, one digest, in every process."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lifecycle.core.digest import canonical, digest, digest_all
from lifecycle.core.ids import ContextKey, Namespace
from lifecycle.core.observations import AppendMessages, RemoveMessages
from lifecycle.core.state import ContextState, Source, Version
from lifecycle.vocabulary import IdentityRung, WaitKind

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text()), inner, max_size=4),
        st.frozensets(st.one_of(st.integers(), st.text()), max_size=4),
    ),
    max_leaves=12,
)


def typed(value):
    """Python's equality with types kept apart: 1, 1.0 and True are three values, -0.0 another than 0.0."""
    if isinstance(value, tuple):
        return ("tuple", *map(typed, value))
    if isinstance(value, dict):
        return ("dict", frozenset((typed(k), typed(v)) for k, v in value.items()))
    if isinstance(value, frozenset):
        return ("set", frozenset(map(typed, value)))
    return (type(value).__name__, repr(value))


@given(VALUES, VALUES)
def test_equal_bytes_for_equal_values_only(one, other):
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


@given(st.dictionaries(st.text(), VALUES, min_size=2), st.randoms(use_true_random=False))
def test_insertion_order_does_not_show(mapping, random):
    shuffled = dict(random.sample(list(mapping.items()), len(mapping)))
    assert digest(shuffled) == digest(mapping)


@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_a_sequence_taken_one_by_one_keeps_its_borders(one, other):
    assert (digest_all(one) == digest_all(other)) == (list(map(typed, one)) == list(map(typed, other)))


def state(**changes) -> ContextState:
    fresh = ContextState(
        uid="u", key=ContextKey("t", "c"), namespace=Namespace("m"), rung=IdentityRung.EXPLICIT
    )
    return replace(fresh, **changes)


FIRST = Version(0, -1, -1, "head", b"h", 0, 5, 0, b"k" * 32)
SECOND = Version(1, 0, 0, "user", b"m")


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {0: FIRST}},
        {"versions": {1: FIRST}},
        {"versions": {0: SECOND}},
        {"wait": WaitKind.TOOL},
        {"wait_eta": 0.0},
        {"closed": "over"},
        {"gap": "over"},
        {"sources": {"s": Source(held={3: AppendMessages(seq=3, ctx="c", n=1)})}},
        {"sources": {"s": Source(held={3: RemoveMessages(seq=3, ctx="c", span=(0, 1))})}},
    ],
)
def test_every_change_of_a_state_shows(changes):
    assert digest(state(**changes)) != digest(state())


def test_order_of_versions_and_sources_does_not_show():
    one = state(versions={0: FIRST, 1: SECOND}, sources={"a": Source(applied=1), "b": Source(applied=2)})
    other = state(versions={1: SECOND, 0: FIRST}, sources={"b": Source(applied=2), "a": Source(applied=1)})
    assert digest(one) == digest(other)


def test_what_has_no_canonical_form_is_refused():
    with pytest.raises(TypeError, match="object"):
        digest({"a": [object()]})


SCRIPT = """
from lifecycle.core.digest import digest
from lifecycle.core.directives import Reclaim
from lifecycle.core.events import CallArrived, ChunksConfirmed, DirectiveProposed, UntrackedForwarded
from lifecycle.core.ids import ContextKey, Namespace
from lifecycle.core.state import ContextState, Source, Version
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.vocabulary import IdentityRung, Tier

names = {f"name{i}" for i in range(40)}
index, digests = ChunkIndex(), []
for name in sorted(names):
    space = Namespace(name[-1])
    versions = {i: Version(i, i - 1, i, "user", name.encode(), keys=bytes([i]) * 32) for i in range(4)}
    state = ContextState(
        uid=name, key=ContextKey("t", name), namespace=space, rung=IdentityRung.NEW, versions=versions,
        sources={n: Source(applied=len(n)) for n in names}, unmapped="lost",
    )
    index.apply(CallArrived(at_ns=5, call_id="c", attempt=1, kept=-1), None, state)
    shown = ChunksConfirmed(at_ns=6, namespace=space, keys=bytes([2]) * 32, tiers=(Tier.L1,), stored=True)
    index.apply(shown, None, None)
    asked = Reclaim(directive_id=name, namespace=space, reason="r", keys=bytes([1]) * 32)
    index.apply(DirectiveProposed(at_ns=7, directive=asked, as_of=1), None, None)
    digests.append(digest(state))
print(digest([digests, names, frozenset(names)]).hex(), index.digest().hex())
"""


def test_three_hash_seeds_one_digest():
    printed = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1
    assert len(printed.pop().split()) == 2
