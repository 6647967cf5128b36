"""Upcasting: an event recorded under an old tag, brought to the form the current types decode.

A step takes the raw mapping of one old tag and returns the raw mapping of a newer one. Steps are chained
until no step knows the tag, so each needs to know only its successor. Tags are never reused.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from lifecycle.errors import CorruptLog

RawEvent: TypeAlias = Mapping[str, Any]
"""An event before it has a type: field names to plain values, the tag under `type`."""

Upcast: TypeAlias = Callable[[RawEvent], RawEvent]

UPCASTS: Mapping[str, Upcast] = {}
"""Steps by the tag they lead away from."""


def upcast(raw: RawEvent, steps: Mapping[str, Upcast] = UPCASTS) -> RawEvent:
    """Follow the chain of `steps` from the tag of `raw`; without a step for it, `raw` itself.

    Raises `CorruptLog` when the steps lead back to a tag they already left.
    """
    left: set[str] = set()
    while (step := steps.get(tag := raw.get("type", ""))) is not None:
        if tag in left:
            raise CorruptLog(f"the upcasts of event type {tag!r} lead back to it")
        left.add(tag)
        raw = step(raw)
    return raw
