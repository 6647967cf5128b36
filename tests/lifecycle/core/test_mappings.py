"""What mappings make of a call's list: early, late, otherwise than before, or not at all."""

import pytest
from msgspec.structs import replace

from lifecycle.core.events import CallMapped
from lifecycle.core.observations import CallMapping, PromptMapping
from lifecycle.errors import InvalidObservation
from lifecycle.vocabulary import MappingKind, VersionState
from tests.lifecycle.core.story import Story, mapping_of

SUSPENDED, PENDING = VersionState.SUSPENDED, VersionState.PENDING


def test_a_message_rendered_otherwise_is_another_version() -> None:
    """A template that strips thinking from earlier turns: the same messages, other tokens."""
    story = Story()
    story.call("s0 u1 a1 t1")
    old = story.chain("s0 u1 a1 t1")
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.map("c2", stripped=["a1"])
    assert old <= story.keys_live()
    story.first("c2")
    assert story.chain("s0 u1 a1 t1 u2", ["a1"]) <= story.keys_live()
    assert old <= story.keys_live()
    assert story.live()["s0 u1 a1"] is SUSPENDED
    doubted = [b for b in story.state.branches if b.doubted_ns]
    assert len(doubted) == 1
    story.end("c2")
    story.arrive("s0 u1 a1 t1 u2 a2", "c3")
    story.map("c3", stripped=["a1"])
    story.first("c3")
    assert not (old - story.chain("s0 u1")) & story.keys_live()


def test_a_late_mapping_moves_the_branch_that_took_the_list() -> None:
    story = Story()
    story.call("s0 u1 a1 t1")
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.first("c2")
    story.map("c2", stripped=["a1"])
    new = story.chain("s0 u1 a1 t1 u2", ["a1"])
    assert new <= story.keys_live()
    story.end("c2")
    assert new <= story.keys_live()
    story.arrive("s0 u1 a1 t1 u2 a2", "c3")
    story.map("c3", stripped=["a1"])
    (mapped,) = [e for e in story.seen if isinstance(e, CallMapped)]
    assert mapped.first_changed == 6  # head and five messages lie where they lay
    story.first("c3")
    assert new <= story.keys_live()


def test_a_late_mapping_of_an_unmapped_list_fills_it_in_place() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.first()
    assert set(story.live().values()) == {PENDING}
    num = len(story.state.versions)
    story.map()
    assert len(story.state.versions) == num
    assert story.chain("s0 u1") <= story.keys_live()


def test_a_mapping_after_the_end_is_taken_and_until_then_the_context_is_unmapped() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.first()
    story.end()
    assert story.state.unmapped
    assert story.map()
    assert not story.state.unmapped
    assert story.chain("s0 u1") <= story.keys_live()
    assert story.map() == []


def test_a_mapping_after_the_end_moves_to_copies_too() -> None:
    story = Story()
    story.call("s0 u1 a1 t1")
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.first("c2")
    story.end("c2")
    story.map("c2", stripped=["a1"])
    new = story.chain("s0 u1 a1 t1 u2", ["a1"])
    assert new <= story.keys_live()
    story.call("s0 u1 a1 t1 u2 a3", "c3")
    assert not story.state.unmapped


def test_another_calls_mapping_does_not_tell_the_tokens_of_an_unmapped_branch() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    story.first("left")
    story.end("left")
    story.map("right")
    assert story.state.unmapped
    story.map("left")
    assert not story.state.unmapped


def test_a_call_without_mapping_makes_the_context_unmapped_until_the_next_exact_one() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.see(
        CallMapping(
            at_ns=story.now,
            call_id="c1",
            attempt=1,
            mapping=PromptMapping(kind=MappingKind.NONE, reason="no template"),
        )
    )
    story.first()
    story.end()
    assert story.state.unmapped == "no template"
    story.call("s0 u1 a1", "c2")
    assert not story.state.unmapped
    assert story.chain("s0 u1 a1") <= story.keys_live()


def test_a_call_in_flight_without_mapping_keeps_the_context_unmapped_whatever_others_tell() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    none = PromptMapping(kind=MappingKind.NONE, reason="no template")
    story.see(CallMapping(at_ns=story.now, call_id="left", attempt=1, mapping=none))
    story.map("right")
    story.first("left")
    assert story.state.unmapped == "no template"


def test_a_mapping_does_not_end_what_the_cache_said_and_the_cache_not_what_a_mapping_lacks() -> None:
    story = Story()
    story.call("s0 u1")
    story.verify("the cache holds other keys")
    assert story.state.unmapped == "the cache holds other keys"
    assert story.verify("the cache holds other keys") == []
    story.arrive("s0 u1 a1", "c2")
    none = PromptMapping(kind=MappingKind.NONE, reason="no template")
    story.see(CallMapping(at_ns=story.now, call_id="c2", attempt=1, mapping=none))
    assert story.state.unmapped == "the cache holds other keys"
    story.verify()
    assert story.state.unmapped == "no template"
    story.first("c2")
    story.end("c2")
    story.call("s0 u1 a1 u2", "c3")
    assert not story.state.unmapped
    assert story.verify() == []


@pytest.mark.parametrize(
    "change",
    [
        {"message_ends": (5,)},
        {"message_ends": (9, 4)},
        {"chunk_keys": b""},
        {"chunk_size": 0},
        {"num_tokens": 2},
    ],
)
def test_a_mapping_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    story = Story()
    story.arrive("s0 u1")
    mapping = replace(mapping_of(["s0", "u1"]), **change)
    with pytest.raises(InvalidObservation):
        story.see(CallMapping(at_ns=story.now, call_id="c1", attempt=1, mapping=mapping))
