"""What a harness's hooks tell of its contexts, in words that are the same for every harness."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from lifecycle.vocabulary import WaitKind
from proxy.errors import InvalidRequest
from proxy.operations import MAX_LABEL_LENGTH, is_label

MAX_ID_LENGTH = 1024
"""Longest id that a hook may name; harnesses number with UUIDs."""


class CompactionBegins(msgspec.Struct, frozen=True):
    """The harness is about to sum up the history of a context."""

    ctx: str


class CompactionDone(msgspec.Struct, frozen=True):
    """The history that `CompactionBegins` found is replaced.

    `keeps_asked`: the instructions and words of the user that the list begins with stay before the summary.
    """

    ctx: str
    keeps_asked: bool = False


class SubagentBegan(msgspec.Struct, frozen=True):
    """A context of its own begins, and belongs to another."""

    ctx: str
    parent: str


class Waits(msgspec.Struct, frozen=True):
    """The agent of a context waits. `tool` names the tool, empty if it waits for none."""

    ctx: str
    kind: WaitKind
    tool: str = ""


class GoesOn(msgspec.Struct, frozen=True):
    """The agent of a context waits no more."""

    ctx: str


class TurnOver(msgspec.Struct, frozen=True):
    """The agent of a context has nothing more to do: a subagent is at its end, another waits for its user."""

    ctx: str


class Over(msgspec.Struct, frozen=True):
    """A context is at its end, and with it its subagents, if `subagents`."""

    ctx: str
    subagents: bool = False


HookFact: TypeAlias = CompactionBegins | CompactionDone | SubagentBegan | Waits | GoesOn | TurnOver | Over


def required_text(event: Mapping[str, Any], name: str) -> str:
    """A field that must be there. Raises `InvalidRequest`."""
    value = event.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_LENGTH:
        raise InvalidRequest(f"{name} is a string of 1 to {MAX_ID_LENGTH} characters")
    return value


def optional_text(event: Mapping[str, Any], name: str) -> str:
    """A field that may be absent or null. Raises `InvalidRequest` if it is anything else but text."""
    return required_text(event, name) if event.get(name) not in (None, "") else ""


def tool_named(event: Mapping[str, Any], name: str) -> str:
    """A tool's name as a label; empty if there is none that could be one."""
    value = event.get(name)
    return value if isinstance(value, str) and is_label(value, MAX_LABEL_LENGTH) else ""
