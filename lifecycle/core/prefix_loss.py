"""Where a prompt leaves the one before it, and what that costs: the chunks that a prompt which went on would
have found in the cache.

Costs are whole chunks, by both prompts' keys. What stands behind the end of the last prompt had to be
computed anyway and counts for nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec
from msgspec.structs import replace

from lifecycle.core.events import ListEdited, PrefixDiverged
from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.observations import CallMapping, PromptMapping
from lifecycle.core.state import (
    HEAD_INDEX,
    Branch,
    ContextState,
    DeclaredEdit,
    Divergence,
    Flight,
    PrefixLint,
    Version,
    chain,
    path,
)
from lifecycle.core.tree import editable_list
from lifecycle.vocabulary import MappingKind, PrefixBreak

NUM_KEPT = 16
"""Divergences of a context that stay readable, the latest."""

UNKNOWN = -1

_SYSTEM_ROLES = ("system", "developer")
_NO_ANSWER = (*_SYSTEM_ROLES, "user", "tool")
"""Where a message of these roles follows a list, the answer to it did not come back."""

_TOLD_BY_TEXT = (PrefixBreak.HEAD, PrefixBreak.SYSTEM, PrefixBreak.MESSAGE)
"""What the two texts may say more exactly."""


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """One place where a prompt leaves another. Fields as in `PrefixDiverged`."""

    kind: PrefixBreak
    index: int
    role: str = ""
    declared: bool = False
    shared_tokens: int = UNKNOWN
    lost_tokens: int = UNKNOWN
    against: str = ""


def prompt_left(state: ContextState, flight: Flight, mapping: PromptMapping) -> Sequence[Left]:
    """Where a call's prompt, whose mapping is about to be recorded, leaves the one that it should go on with.

    Not asked of one-offs, and not of calls beside another one: those are branches, and both live on. Of
    several places only the first counts.
    """
    if state.one_off or flight.one_off or flight.concurrent or flight.stale:
        return ()
    if flight.branch < 0:
        other = mapping.beside
        if other is None or state.forked:
            return ()
        fields = msgspec.structs.asdict(other)
        return (Left(against=fields.pop("uid"), **fields),)
    found = _list_left(state, flight, mapping) if flight.diverges else None
    found = found or _declared(state, flight, mapping) or _tokens_left(state, flight, mapping)
    return (found,) if found is not None else ()


def diverged(at_ns: int, observation: CallMapping, left: Left) -> PrefixDiverged:
    """The event."""
    fields = msgspec.structs.asdict(left)
    return PrefixDiverged(at_ns=at_ns, call_id=observation.call_id, attempt=observation.attempt, **fields)


def declared_edit(state: ContextState, event: ListEdited) -> DeclaredEdit | None:
    """What the next call will show of declared edits; `state` is that before this one."""
    messages = editable_list(state)
    if event.start >= len(messages):
        return state.edit
    branch = state.current_branch()
    tips = (branch.tip, *branch.tails) if branch is not None else (messages[-1].id,)
    here = DeclaredEdit(event.start, max(state.versions[tip].end_chunk for tip in tips), event.num_new > 0)
    before = state.edit
    if before is None:
        return here
    return DeclaredEdit(
        min(here.start, before.start), max(here.num_chunks, before.num_chunks), here.brings or before.brings
    )


def noted(lint: PrefixLint, event: PrefixDiverged) -> PrefixLint:
    """The totals with one more."""
    cost = max(event.lost_tokens, 0)
    one = Divergence(
        at_ns=event.at_ns,
        call_id=event.call_id,
        kind=event.kind,
        index=event.index,
        role=event.role,
        declared=event.declared,
        shared_tokens=event.shared_tokens,
        lost_tokens=event.lost_tokens,
        against=event.against,
    )
    lint = replace(lint, last=(*lint.last, one)[-NUM_KEPT:])
    if event.against:
        return replace(lint, beside=lint.beside + 1, beside_lost_tokens=lint.beside_lost_tokens + cost)
    if event.declared:
        return replace(
            lint, declared=lint.declared + 1, declared_lost_tokens=lint.declared_lost_tokens + cost
        )
    return replace(lint, count=lint.count + 1, lost_tokens=lint.lost_tokens + cost)


def shared_chunks(one: bytes, other: bytes) -> int:
    """How many chunk keys two runs begin with together; a key names its whole prefix, so O(log n)."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * KEY_BYTES, middle * KEY_BYTES)
        low, high = (middle, high) if one[at] == other[at] else (low, middle - 1)
    return low


def _list_left(state: ContextState, flight: Flight, mapping: PromptMapping) -> Left | None:
    """The messages, or what stands before them, are others from some place on."""
    branch = state.branch(flight.branch)
    if branch is None:
        return None
    old, new = path(state.versions, branch.tip), path(state.versions, flight.tip)
    at = next(
        (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a.digest != b.digest),
        min(len(old), len(new)),
    )
    if at == len(old):
        return None
    kind = _kind([v.digest for v in old[at:]], new[at:], at)
    if mapping.change is not None and kind in _TOLD_BY_TEXT:
        kind = mapping.change
    shared, lost = _cost(state, [branch], mapping)
    if at == len(old) - 1 == len(new) - 1 and lost == 0 and shared >= old[-1].end_chunk * mapping.chunk_size:
        # A last message that only grew, as the prompt of a completion does: its tokens go on.
        return None
    role = new[at].role if 0 < at < len(new) else ""
    return Left(kind=kind, index=at - 1, role=role, shared_tokens=shared, lost_tokens=lost)


def _kind(old: Sequence[bytes], new: Sequence[Version], at: int) -> PrefixBreak:
    if not new:
        return PrefixBreak.SHORTENED
    if at == 0:
        return PrefixBreak.HEAD
    if new[0].digest in old[1:]:
        return PrefixBreak.REMOVED
    if any(version.digest == old[0] for version in new[1:]):
        return PrefixBreak.INSERTED
    return PrefixBreak.SYSTEM if new[0].role in _SYSTEM_ROLES else PrefixBreak.MESSAGE


def _declared(state: ContextState, flight: Flight, mapping: PromptMapping) -> Left | None:
    edit = state.edit
    if edit is None:
        return None
    new = path(state.versions, flight.tip)
    role = new[edit.start + 1].role if edit.start + 1 < len(new) else ""
    kind = PrefixBreak.REPLACED if edit.brings else PrefixBreak.REMOVED
    shared = lost = UNKNOWN
    if mapping.kind is not MappingKind.NONE:
        num_new = len(mapping.chunk_keys) // KEY_BYTES
        kept = shared_chunks(_known(new), mapping.chunk_keys)
        shared, lost = (
            kept * mapping.chunk_size,
            max(min(edit.num_chunks, num_new) - kept, 0) * mapping.chunk_size,
        )
    return Left(kind=kind, index=edit.start, role=role, declared=True, shared_tokens=shared, lost_tokens=lost)


def _tokens_left(state: ContextState, flight: Flight, mapping: PromptMapping) -> Left | None:
    """The messages are the same, their tokens are not, or the answer to them came back as other tokens."""
    if mapping.kind is MappingKind.NONE:
        return None
    steps = path(state.versions, flight.tip)
    known = _known(steps)
    shared = shared_chunks(known, mapping.chunk_keys)
    size = mapping.chunk_size
    if shared < len(known) // KEY_BYTES:
        step = next(v for v in steps if v.end_chunk > shared)
        lost = min(len(known), len(mapping.chunk_keys)) // KEY_BYTES - shared
        role = step.role if step.index != HEAD_INDEX else ""
        return _if_it_costs(PrefixBreak.RENDERED, step.index, role, shared * size, lost * size)
    gone_on_with = list(_gone_on_with(state, flight, steps))
    if not gone_on_with:
        return None
    kept, lost = _cost(state, gone_on_with, mapping)
    last = max(state.versions[branch.tip].index for branch in gone_on_with)
    role = next((v.role for v in steps if v.index == last + 1), "")
    rewritten = mapping.change is PrefixBreak.ANSWER or role in _NO_ANSWER
    kind = PrefixBreak.ANSWER if rewritten else PrefixBreak.RENDERED
    return _if_it_costs(kind, last + 1, role, kept, lost)


def _gone_on_with(state: ContextState, flight: Flight, steps: Sequence[Version]) -> Iterator[Branch]:
    """Branches behind whose list something was generated and which this call goes on with: still there, or
    left over when it took their place."""
    on_path = {version.id for version in steps}
    for branch in state.branches:
        ours = branch.id == flight.branch and not flight.prefilled
        left_over = flight.prefilled and branch.doubted_ns >= flight.arrived_ns
        if branch.tails and branch.tip in on_path and branch.tip != flight.tip and (ours or left_over):
            yield branch


def _cost(state: ContextState, branches: Sequence[Branch], mapping: PromptMapping) -> tuple[int, int]:
    """Shared and lost tokens of the continuation that shares most, whichever of its choices that is."""
    if mapping.kind is MappingKind.NONE:
        return UNKNOWN, UNKNOWN
    best: tuple[int, int] | None = None
    for branch in branches:
        for tip in branch.tails or (branch.tip,):
            if not state.versions[tip].mapped:
                continue
            old = chain(state.versions, tip)
            shared = shared_chunks(old, mapping.chunk_keys)
            lost = min(len(old), len(mapping.chunk_keys)) // KEY_BYTES - shared
            if best is None or (shared, -lost) > (best[0], -best[1]):
                best = shared, lost
    if best is None:
        return UNKNOWN, UNKNOWN
    return best[0] * mapping.chunk_size, best[1] * mapping.chunk_size


def _known(steps: Sequence[Version]) -> bytes:
    """Keys of the path as far as its tokens were known."""
    return b"".join(version.keys for version in takewhile(lambda version: version.mapped, steps))


def _if_it_costs(kind: PrefixBreak, index: int, role: str, shared: int, lost: int) -> Left | None:
    if lost <= 0:
        return None
    return Left(kind=kind, index=index, role=role, shared_tokens=shared, lost_tokens=lost)
