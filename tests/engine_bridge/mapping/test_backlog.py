"""Room for so much new text at a time, whoever's it is."""

from contextlib import suppress

import pytest

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.backlog import MappingBacklog


def test_what_would_be_mapped_too_late_finds_no_room():
    backlog = MappingBacklog(max_chars=100)
    with backlog.room() as one, backlog.room() as two:
        one.take(60)
        two.take(40)
        assert backlog.waiting_chars == 100
        with backlog.room() as late, pytest.raises(Unmappable, match="100 characters"):
            late.take(1)
        two.take(30)
        one.take(60)
        assert backlog.waiting_chars == 100, "who has room keeps it"
        with pytest.raises(Unmappable, match="60 characters"):
            two.take(41)
    assert backlog.waiting_chars == 0
    with backlog.room() as free:
        free.take(100)


def test_one_alone_may_be_any_size_and_nobody_comes_beside_it():
    backlog = MappingBacklog(max_chars=100)
    with backlog.room() as large, backlog.room() as small:
        large.take(1_000)
        large.take(2_000)
        with pytest.raises(Unmappable):
            small.take(1)
    assert backlog.waiting_chars == 0


def test_a_failure_gives_the_room_back():
    backlog = MappingBacklog(max_chars=100)
    with suppress(RuntimeError), backlog.room() as room:
        room.take(50)
        raise RuntimeError
    assert backlog.waiting_chars == 0
