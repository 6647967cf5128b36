"""Pins: leased holds on a chain that follow their message."""

import pytest

from lifecycle.core.events import OperationRejected, PinMoved, PinRefused, PinSet
from lifecycle.core.observations import DeclareResumed, PinSpan, RemoveMessages, ReplaceMessages, UnpinSpan
from lifecycle.core.pins import PIN_LIMIT_REASON
from lifecycle.vocabulary import VersionState
from tests.lifecycle.core.story import BYTES_PER_TOKEN, SECOND, Story, mapping_of, pin, unpin

PINNED = VersionState.PINNED


def pinned(span: tuple[int, int] | str = (0, 2), **fields: object) -> Story:
    story = Story()
    story.call("s0 u1 a1 t1")
    story.do(PinSpan, span=span, **fields)
    return story


def test_a_pin_holds_the_chain_to_the_end_of_its_span() -> None:
    story = pinned((1, 2))
    assert story.live() == {
        "s0": PINNED,
        "s0 u1": PINNED,
        "s0 u1 a1": VersionState.SUSPENDED,
        "s0 u1 a1 t1": VersionState.SUSPENDED,
    }
    (hold,) = story.state.pins
    assert hold.until_ns == story.now + 300 * SECOND
    assert hold.size_bytes == story.path_of("s0 u1").end * BYTES_PER_TOKEN


def test_a_second_identical_pin_changes_nothing_but_at_most_the_lease() -> None:
    story = pinned(ttl=100.0)
    (before,) = story.state.pins
    versions = story.state.versions
    story.do(PinSpan, span=(0, 2), ttl=10.0)
    assert story.state.pins == (before,)
    story.do(PinSpan, span=(0, 2), ttl=200.0)
    (after,) = story.state.pins
    assert after.pin_id == before.pin_id
    assert after.until_ns == story.now + 200 * SECOND
    assert story.state.versions == versions


def test_renewing_a_pin_keeps_its_priority() -> None:
    story = pinned(priority=3)
    story.do(PinSpan, span=(0, 2), ttl=900.0)
    assert [p.priority for p in story.state.pins] == [3]
    story.do(PinSpan, span=(0, 2), priority=0)
    assert [p.priority for p in story.state.pins] == [0]


def test_unpin_brings_back_the_ordinary_state() -> None:
    story = pinned()
    story.do(UnpinSpan, span=(0, 2))
    assert set(story.live().values()) == {VersionState.SUSPENDED}
    story.do(UnpinSpan, span=(0, 2))
    assert story.names() == ["OperationApplied"]


def test_the_lease_ends_the_pin() -> None:
    story = pinned(ttl=10.0)
    story.tick(9.9)
    assert PINNED in story.live().values()
    story.tick(0.2)
    assert PINNED not in story.live().values()


@pytest.mark.parametrize("ttl", [0.0, -1.0, 3601.0, float("nan")])
def test_a_lease_is_above_zero_and_at_most_an_hour(ttl: float) -> None:
    story = pinned(ttl=ttl)
    assert story.names() == ["OperationRejected"]


@pytest.mark.parametrize("span", [(2, 2), (3, 1), (0, 5), (-1, 1), "nothing", "tools"])
def test_a_span_that_is_not_there_is_refused(span: tuple[int, int] | str) -> None:
    story = pinned(span)
    assert story.names() == ["OperationRejected"]
    assert not story.state.pins


def test_a_pin_needs_tokens() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.first()
    story.end()
    story.do(PinSpan, span=(0, 1))
    assert story.names() == ["OperationRejected"]


def test_a_pin_beyond_the_budget_is_refused() -> None:
    story = Story()
    story.call("s0 u1")
    needed = story.path_of("s0 u1").end * BYTES_PER_TOKEN
    story.do(PinSpan, span=(0, 2), budget=needed - 1)
    (event,) = story.seen
    assert isinstance(event, OperationRejected)
    story.do(PinSpan, span=(0, 2), budget=needed)
    assert len(story.state.pins) == 1
    story.do(PinSpan, span=(0, 2), budget=0)  # renewing needs nothing more
    assert "PinSet" in story.names()


def test_system_names_the_leading_instructions() -> None:
    story = pinned("system")
    assert [v for v, s in story.live().items() if s is PINNED] == ["s0"]


def test_system_is_what_stands_before_a_list_without_instructions() -> None:
    story = Story()
    story.call("u1")
    story.do(PinSpan, span="system")
    (hold,) = story.state.pins
    assert hold.index == -1


def test_tools_names_the_part_of_the_head_that_holds_them() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map(tools_end=2)
    story.first()
    story.end()
    story.do(PinSpan, span="tools")
    (hold,) = story.state.pins
    assert hold.index == -1
    story.close()
    assert len(story.state.versions) == 1


def test_a_pin_survives_close_and_then_ends_by_its_own_lease() -> None:
    story = pinned(ttl=100.0)
    story.close()
    assert story.live() == {"s0": PINNED, "s0 u1": PINNED}
    story.tick(101)
    assert story.state.versions == {}


def test_unpin_ends_a_closed_contexts_pin_on_exactly_the_span_it_holds() -> None:
    story = pinned(ttl=100.0)
    story.close()
    assert [type(e) for e in story.do(UnpinSpan, span=(0, 1))] == [OperationRejected]
    assert story.live() == {"s0": PINNED, "s0 u1": PINNED}
    story.do(UnpinSpan, span=(0, 2))
    assert story.state.versions == {}


# -- following --------------------------------------------------------------------------------------------


def test_a_pin_follows_its_message_after_a_declared_change_of_the_prefix() -> None:
    story = pinned((0, 3))
    old = story.chain("s0 u1 a1")
    story.do(ReplaceMessages, span=(1, 2), n=1)
    (hold,) = story.state.pins
    assert hold.moving
    assert not (old - story.chain("s0")) & story.keys_live()
    story.arrive("s0 u9 a1 t1", "c2")
    story.map("c2")
    story.first("c2")
    (moved,) = [e for e in story.seen if isinstance(e, PinMoved)]
    assert moved.size_bytes == story.path_of("s0 u9 a1").end * BYTES_PER_TOKEN
    assert story.live()["s0 u9 a1"] is PINNED
    assert story.live()["s0 u9 a1 t1"] is VersionState.SUSPENDED


def test_a_pin_follows_its_message_to_another_place_in_the_list() -> None:
    story = pinned((0, 3))
    story.do(RemoveMessages, span=(1, 2))
    story.call("s0 a1 t1", "c2")
    assert story.live()["s0 a1"] is PINNED


def test_a_pin_follows_its_message_after_an_undeclared_change() -> None:
    story = pinned((0, 3))
    old = story.chain("s0 u1 a1")
    story.call("s0 u9 a1 t1", "c2")
    assert story.live()["s0 u9 a1"] is PINNED
    assert story.live()["s0 u1 a1"] is VersionState.DOUBTFUL
    story.tick(61)
    assert not (old - story.chain("s0")) & story.keys_live()


def test_a_pin_follows_its_message_back() -> None:
    story = pinned((0, 3))
    story.call("s0 u9 a1 t1", "c2")
    story.call("s0 u1 a1 t1", "c3")
    assert story.live()["s0 u1 a1"] is PINNED
    assert story.live()["s0 u9 a1"] is VersionState.DOUBTFUL


def test_a_pin_waits_for_the_tokens_of_its_new_version() -> None:
    story = pinned((0, 3))
    story.arrive("s0 u9 a1 t1", "c2")
    story.first("c2")
    assert story.live()["s0 u1 a1"] is PINNED
    story.map("c2")
    assert story.live()["s0 u9 a1"] is PINNED
    (hold,) = story.state.pins
    assert hold.size_bytes == story.path_of("s0 u9 a1").end * BYTES_PER_TOKEN


def test_a_pin_follows_a_render_that_strips_what_stands_before_it() -> None:
    story = pinned((0, 4))
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.first("c2")
    story.map("c2", stripped=["a1"])
    (hold,) = story.state.pins
    assert hold.tip == story.path_of("s0 u1 a1 t1").id


def test_a_pin_whose_message_does_not_come_back_stays_till_its_lease_ends() -> None:
    story = pinned((0, 3), ttl=1000.0)
    story.call("s0 u1 a7", "c2")
    story.call("s0 u1 a7 u3", "c3")
    assert story.live()["s0 u1 a1"] is PINNED


def test_a_pin_on_a_message_that_is_removed_ends() -> None:
    story = pinned((0, 3))
    story.do(RemoveMessages, span=(2, 3))
    assert "PinReleased" in story.names()
    assert not story.state.pins


def test_a_concurrent_list_with_an_equal_message_does_not_take_the_pin() -> None:
    story = pinned((0, 3))
    story.arrive("s0 u1 a1 t1 u2", "main")
    story.arrive("u8 a1", "side")
    for call in ("main", "side"):
        story.map(call)
        story.first(call)
        story.end(call)
    assert story.live()["s0 u1 a1"] is PINNED
    assert story.live()["u8 a1"] is VersionState.SUSPENDED


def test_an_edit_of_the_own_list_does_not_end_a_pin_on_another_branch() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    story.map("left", 1)
    story.map("right", 1)
    story.first("left")
    story.end("left")
    story.do(PinSpan, span=(0, 3))
    story.first("right")
    story.end("right")
    story.do(RemoveMessages, span=(2, 3))
    assert story.live()["s0 u1 a1"] is PINNED


def test_a_pin_on_its_way_is_another_pin_than_one_on_the_prefix_it_holds() -> None:
    story = pinned((0, 4))
    story.do(ReplaceMessages, span=(2, 3), n=1)
    story.do(PinSpan, span=(0, 2))
    assert len(story.state.pins) == 2
    story.do(UnpinSpan, span=(0, 2))
    assert len(story.state.pins) == 1
    story.call("s0 u1 a9 t1", "c2")
    assert story.live()["s0 u1 a9 t1"] is PINNED


def test_a_new_pin_where_an_old_one_left_is_another_pin() -> None:
    story = pinned((0, 3))
    story.call("s0 u9 a1 t1", "c2")  # the pin goes along
    story.arrive("s0 u1 a1 t1", "c3", pins=(pin((0, 3)),))
    story.map("c3")
    assert len(story.state.pins) == 2
    assert story.live()["s0 u9 a1"] is PINNED
    assert story.live()["s0 u1 a1"] is PINNED


# -- riding on a call -------------------------------------------------------------------------------------


def test_a_pin_on_a_call_is_set_once_its_tokens_are_known() -> None:
    story = Story()
    story.arrive("s0 u1", pins=(pin("system", 60.0),))
    assert not story.state.pins
    story.map()
    assert [isinstance(e, PinSet) for e in story.seen] == [False, True]
    story.abort()
    assert story.live() == {"s0": PINNED}


def test_a_retry_repeats_none_of_its_pins() -> None:
    story = Story()
    story.arrive("s0 u1", pins=(pin((0, 1)),))
    story.map()
    story.abort()
    story.do(UnpinSpan, span=(0, 1))
    story.call("s0 u1", "c0")
    story.do(UnpinSpan, span=(0, 1))
    story.arrive("s0 u1", pins=(pin((0, 1)),))
    story.map("c1", 2)
    assert not story.state.pins


def test_a_retry_sets_what_the_first_attempt_could_not() -> None:
    story = Story()
    story.arrive("s0 u1", pins=(pin((0, 1)),))
    story.abort()
    story.arrive("s0 u1", pins=(pin((0, 1)),))
    story.map("c1", 2)
    assert len(story.state.pins) == 1


def test_pins_of_one_call_share_the_budget() -> None:
    story = Story()
    story.arrive("s0 u1", pins=(pin((0, 1)), pin((0, 2)), unpin((0, 1))))
    first = mapping_of(["s0"]).message_ends[0]
    story.map(budget=first * BYTES_PER_TOKEN)
    assert len(story.state.pins) == 0
    refused = [e for e in story.seen if isinstance(e, PinRefused)]
    assert [e.span for e in refused] == ["(0, 2)"]


def test_pins_beyond_their_number_are_refused_and_renewing_needs_no_room() -> None:
    story = Story()
    story.call("s0 u1")
    story.do(PinSpan, span=(0, 1), pins_left=1)
    story.do(PinSpan, span=(0, 2), pins_left=0)
    (event,) = story.seen
    assert isinstance(event, OperationRejected)
    assert event.reason.startswith(PIN_LIMIT_REASON)
    story.do(PinSpan, span=(0, 1), pins_left=0)
    assert "PinSet" in story.names()
    assert len(story.state.pins) == 1


def test_pins_of_one_call_share_their_number() -> None:
    story = Story()
    story.arrive("s0 u1 a1", pins=(pin((0, 1)), pin((0, 2)), unpin((0, 1)), pin((0, 3))))
    story.map(pins_left=1)
    assert [p.index for p in story.state.pins] == [2]
    assert [e.span for e in story.seen if isinstance(e, PinRefused)] == ["(0, 2)"]


def test_pins_that_waited_for_one_operation_share_the_room() -> None:
    story = Story()
    story.call("s0 u1 a1")
    story.do(PinSpan, 2, span=(0, 1))
    story.do(PinSpan, 3, span=(0, 2))
    first = mapping_of(["s0"]).message_ends[0]
    story.do(DeclareResumed, 1, budget=first * BYTES_PER_TOKEN)
    assert len(story.state.pins) == 1
    assert [e.seq for e in story.seen if isinstance(e, OperationRejected)] == [3]
