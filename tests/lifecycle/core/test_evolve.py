"""Replay: the same events give the same state, through bytes, from a snapshot, under any hash seed."""

import os
import subprocess
import sys

import msgspec
import pytest

from lifecycle.core.digest import digest
from lifecycle.core.events import PrefillDone
from lifecycle.core.evolve import evolve
from lifecycle.core.observations import (
    AppendMessages,
    CloseContext,
    DeclareWaiting,
    PinSpan,
    ReplaceMessages,
)
from lifecycle.core.state import ContextState
from lifecycle.store.codec import decode, encode
from lifecycle.vocabulary import WaitKind
from tests.lifecycle.core.story import Story, pin


def eventful() -> Story:
    """A bit of everything."""
    story = Story()
    story.call("s0 u1", pins=(pin("system"),))
    story.arrive("s0 u1 a1 u2", "c2", num_choices=2)
    story.map("c2")
    story.first("c2")
    story.generate("a2", "c2", choice=0)
    story.generate("a3", "c2", choice=1)
    story.end("c2")
    story.do(PinSpan, span=(0, 3), ttl=900.0)
    story.do(ReplaceMessages, span=(1, 2), n=1)
    story.call("s0 u5 a1 u2", "c3", source="sdk", seq=2)
    story.arrive("s0 u5 a1 u2 a4", "left")
    story.arrive("s0 u5 a1 u2 a5", "right")
    story.first("left")
    story.map("left", stripped=["a1"])
    story.map("right", stripped=["a1"])
    story.first("right")
    story.end("left")
    story.abort("right")
    story.do(DeclareWaiting, kind=WaitKind.TOOL, tool="bash", eta=2.5)
    story.do(AppendMessages, seq=9, n=1)
    story.tick(6)
    story.verify("other keys")
    story.arrive("s0 u7", "open")
    return story


def test_replay_of_the_recorded_events_is_the_live_state() -> None:
    story = eventful()
    state: ContextState | None = None
    for event in story.events:
        state = evolve(state, decode(encode(event)))
    assert state == story.state


def test_a_snapshot_and_the_tail_are_the_live_state() -> None:
    story = eventful()
    for cut in range(1, len(story.events)):
        state: ContextState | None = None
        for event in story.events[:cut]:
            state = evolve(state, event)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ContextState)
        for event in story.events[cut:]:
            state = evolve(state, event)
        assert state == story.state
        assert digest(state) == digest(story.state)


def test_the_digest_is_the_same_under_any_hash_seed() -> None:
    code = (
        "from tests.lifecycle.core.test_evolve import eventful\n"
        "from lifecycle.core.digest import digest, digest_all\n"
        "story = eventful()\n"
        "print(digest(story.state).hex(), digest_all(story.events).hex())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1


def test_a_stream_begins_with_the_creation() -> None:
    with pytest.raises(TypeError):
        evolve(None, PrefillDone(at_ns=1, call_id="c", attempt=1))


def test_everything_comes_to_an_end() -> None:
    story = eventful()
    story.first("open")
    story.end("open")
    story.do(CloseContext)
    story.close()
    story.tick(3600)
    assert story.state.versions == {}
    assert not story.state.branches
    assert not story.state.pins
    assert not story.state.flights


def test_a_long_conversation_holds_its_own_list_and_little_more() -> None:
    story = Story()
    words = ["s0"]
    for turn in range(120):
        words += [f"u{turn}"]
        story.arrive(" ".join(words), f"c{turn}", source="sdk", seq=0)
        stripped = words[:-1] if turn % 9 == 0 else ()
        story.map(f"c{turn}", stripped=stripped)
        story.first(f"c{turn}")
        story.generate(f"a{turn}", f"c{turn}", stripped=stripped)
        story.end(f"c{turn}")
        words += [f"a{turn}"]
    assert len(story.state.branches) <= 3
    assert len(story.state.versions) <= 2 * len(words) + 8
    assert len(story.state.attempts) <= 64
