"""Where a prompt leaves the one before it, and what that costs: the chunks that a prompt which went on would
have found in the cache.

Costs are whole chunks, by both prompts' keys. What stands behind the end of the last prompt had to be
computed anyway and counts for nothing.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from lifecycle.core.events import ListEdited, PrefixDiverged
from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.observations import CallMapping, PromptMapping
from lifecycle.core.state import (
    HEAD_INDEX,
    ROOT,
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
    shared, lost = _cost(state, branch, mapping)
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
    known, size = _known(steps), mapping.chunk_size
    shared = shared_chunks(known, mapping.chunk_keys)
    if shared < len(known) // KEY_BYTES:
        step = next(v for v in steps if v.end_chunk > shared)
        lost = min(len(known), len(mapping.chunk_keys)) // KEY_BYTES - shared
        role = step.role if step.index != HEAD_INDEX else ""
        return _if_it_costs(PrefixBreak.RENDERED, step.index, role, shared * size, lost * size)
    answered = _answered(state, flight, steps)
    if answered is None:
        return None
    tip = state.versions[answered.tip]
    kept, lost = max(
        (_answer_cost(state, tail, tip, mapping.chunk_keys) for tail in answered.tails),
        key=lambda pair: (pair[0], -pair[1]),
    )
    index = tip.index + 1
    role = steps[index + 1].role if index + 1 < len(steps) else ""
    rewritten = mapping.change is PrefixBreak.ANSWER or role in _NO_ANSWER
    kind = PrefixBreak.ANSWER if rewritten else PrefixBreak.RENDERED
    return _if_it_costs(kind, index, role, kept * size, lost * size)


def _answered(state: ContextState, flight: Flight, steps: Sequence[Version]) -> Branch | None:
    """The branch behind whose list something was generated and which this call goes on with: still there, or
    left over when it took its place."""
    found = None
    for branch in state.branches:
        if not branch.tails or branch.tip == flight.tip:
            continue
        ours = branch.id == flight.branch and not flight.prefilled
        left_over = flight.prefilled and branch.doubted_ns >= flight.arrived_ns
        at = state.versions[branch.tip].index + 1
        if (ours or left_over) and at < len(steps) and steps[at].id == branch.tip:
            found = branch
    return found


def _answer_cost(state: ContextState, tail: int, tip: Version, new: bytes) -> tuple[int, int]:
    """Chunks shared and lost of a generation behind `tip`, all of whose chunks are shared."""
    run = b""
    while tail not in (tip.id, ROOT):
        version = state.versions[tail]
        run, tail = version.keys + run, version.parent
    behind = new[tip.end_chunk * KEY_BYTES :]
    shared = shared_chunks(run, behind)
    return tip.end_chunk + shared, min(len(run), len(behind)) // KEY_BYTES - shared


def _cost(state: ContextState, branch: Branch, mapping: PromptMapping) -> tuple[int, int]:
    """Shared and lost tokens against a branch and what was generated behind it, by the choice that shares
    most."""
    if mapping.kind is MappingKind.NONE:
        return UNKNOWN, UNKNOWN
    found = []
    for tip in branch.tails or (branch.tip,):
        if state.versions[tip].mapped:
            old = chain(state.versions, tip)
            shared = shared_chunks(old, mapping.chunk_keys)
            found.append((shared, shared - min(len(old), len(mapping.chunk_keys)) // KEY_BYTES))
    shared, lost = max(found, default=(UNKNOWN, UNKNOWN))
    return (shared * mapping.chunk_size, -lost * mapping.chunk_size) if found else (UNKNOWN, UNKNOWN)


def _known(steps: Sequence[Version]) -> bytes:
    """Keys of the path as far as its tokens were known."""
    keys = bytearray()
    for version in steps:
        if not version.mapped:
            break
        keys += version.keys
    return bytes(keys)


def _if_it_costs(kind: PrefixBreak, index: int, role: str, shared: int, lost: int) -> Left | None:
    if lost <= 0:
        return None
    return Left(kind=kind, index=index, role=role, shared_tokens=shared, lost_tokens=lost)
