"""Events of a KV namespace say which one, and are told apart from a context's."""

from typing import get_args

import pytest

from lifecycle.core.events import ContextEvent
from lifecycle.core.ids import Namespace
from lifecycle.core.namespace_events import LoggedEvent, NamespaceEvent
from lifecycle.store.codec import decode, encode
from tests.lifecycle.core.event_examples import full, tag

TYPES = get_args(NamespaceEvent)


@pytest.mark.parametrize("event_type", TYPES, ids=tag)
def test_each_names_its_namespace_through_its_bytes(event_type: type[LoggedEvent]) -> None:
    event = decode(encode(full(event_type)))
    owner = getattr(event, "directive", event)
    assert isinstance(owner.namespace, Namespace)
    assert event == full(event_type)


def test_none_belongs_to_a_context() -> None:
    assert not set(TYPES) & set(get_args(ContextEvent))
