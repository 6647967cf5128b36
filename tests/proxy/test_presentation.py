"""Plain JSON of everything that is true; nothing in it is text, bytes, or not JSON."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.directives import Reclaim
from lifecycle.core.events import Event, RecordedEvent
from lifecycle.core.ids import split_keys
from lifecycle.core.observations import OperationReceived, PinSpan
from lifecycle.projections.contexts import DirectiveRecord
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from proxy.presentation import context_summary, context_view, directive_view, event_view, namespace_views
from tests.lifecycle.core.event_examples import full, members
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.lives import Agent, ManualClock, chain_of


def plain(document: Any) -> Any:
    return json.loads(msgspec.json.encode(document))


@pytest.mark.parametrize("kind", list(members(Event)), ids=lambda kind: kind.__name__)
def test_every_event_can_be_shown(kind: Any) -> None:
    shown = plain(event_view(RecordedEvent("ctx/a", 3, 7, full(kind))))
    assert (shown["position"], shown["stream"], shown["version"]) == (7, "ctx/a", 3)
    assert shown["event"]["type"] == kind.__struct_config__.tag


async def test_a_context_is_shown_as_it_is() -> None:
    tracker = Tracker(MemoryEventLog(), ManualClock())
    agent = Agent(tracker, "uid", "a")
    await agent.open()
    await agent.call("s1 u1 a1")
    await agent.arrive("s1 u1 a1 u2", "c2")
    assert plain(context_summary(agent.state))["state"] == "in_call"
    await agent.map("s1 u1 a1 u2", "c2")
    await agent.first("c2")
    await agent.end("c2")
    pin = OperationReceived(at_ns=agent.now, source="s", operation=PinSpan(seq=1, ctx="a", span=(0, 2)))
    await tracker.observe("uid", pin)
    shown = plain(context_view(agent.state, tracker.contexts.index))
    roles = {v["index"]: v["role"] for v in shown["versions"] if v["index"] >= 0}
    assert roles == {0: "system", 1: "user", 2: "assistant", 3: "user"}
    chunks = [c["key"] for v in shown["versions"] for c in v["chunks"]]
    keys = chain_of("s1 u1 a1 u2")
    assert {key.hex() for key in split_keys(keys)} <= set(chunks)
    states = {v["index"]: v["state"] for v in shown["versions"] if v["index"] >= 0}
    assert states == {0: "pinned", 1: "pinned", 2: "suspended", 3: "suspended"}
    assert len(shown["pins_held"]) == 1
    assert shown["operations"] == {"s": {"applied": 1, "held": []}}
    assert shown["lease_end_ns"] > agent.now
    await agent.close()
    assert plain(context_summary(agent.state))["state"] == "closed"
    assert plain(context_view(agent.state, tracker.contexts.index))["lease_end_ns"] is None
    (books,) = plain(namespace_views(tracker.contexts.index))
    assert (books["model"], books["last_untracked_ns"]) == (NAMESPACE.model, None)


@given(st.binary(min_size=32, max_size=32))
def test_a_directive_without_an_outcome_is_proposed(key: bytes) -> None:
    directive = Reclaim(directive_id="d", namespace=NAMESPACE, reason="r", keys=key)
    shown = plain(directive_view(DirectiveRecord(directive, 5, 6)))
    assert (shown["outcome"], shown["result"], shown["keys"]) == ("proposed", None, key.hex())
