"""The version tree under change: how a list, its tokens, a generation and a declared edit land in it."""

from collections.abc import Sequence

from msgspec.structs import replace

from lifecycle.core.events import CallArrived, CallEnded, CallMapped, GenerationMapped, ListEdited
from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.state import (
    HEAD_INDEX,
    ROOT,
    TAIL_INDEX,
    Branch,
    ContextState,
    Flight,
    PinHold,
    Version,
    list_path,
    path,
    pruned,
)
from lifecycle.vocabulary import CallEnd


def tail_tag(call_id: str, attempt: int, choice: int = -1) -> bytes:
    """Digest of a tail version: which attempt, and for a generation which choice."""
    return f"{call_id}\0{attempt}\0{choice}".encode()


def placed_call(state: ContextState, event: CallArrived) -> ContextState:
    """The tree with the call's new messages and its tail behind `event.kept`, held by a flight."""
    versions = dict(state.versions)
    next_id = state.next_version
    parent = event.kept
    index = versions[parent].index if parent != ROOT else HEAD_INDEX - 1
    if parent == ROOT:
        versions[next_id] = Version(next_id, ROOT, HEAD_INDEX, "head", event.head)
        parent, index, next_id = next_id, HEAD_INDEX, next_id + 1
    for message in event.messages:
        index += 1
        versions[next_id] = Version(next_id, parent, index, message.role, message.digest)
        parent, next_id = next_id, next_id + 1
    tail = Version(next_id, parent, TAIL_INDEX, "tail", tail_tag(event.call_id, event.attempt))
    versions[next_id] = tail
    flight = Flight(
        call_id=event.call_id,
        attempt=event.attempt,
        tip=parent,
        tail=next_id,
        tails=(next_id,),
        arrived_ns=event.at_ns,
        branch=event.branch,
        diverges=event.diverges,
        concurrent=event.concurrent,
        streamed=event.streamed,
        num_choices=event.num_choices,
        closes=event.closes,
        one_off=event.one_off,
        pins=event.pins,
        wait=event.wait,
        tool=event.tool,
        eta=event.eta,
        proxy=event.proxy,
        reopened=state.closed or next((f.reopened for f in state.flights if f.reopened), ""),
    )
    return replace(state, versions=versions, next_version=next_id + 1, flights=(*state.flights, flight))


def placed_mapping(state: ContextState, event: CallMapped) -> ContextState:
    """The tree with the call's token ranges.

    A version whose known tokens differ from the new ones is another version: the template rendered the same
    message otherwise. The call moves to a copy, and whoever else holds the old one keeps it. A call that is
    over is found by its tail, as long as a branch holds that.
    """
    call_tail = tail_of(state, event.call_id, event.attempt)
    if call_tail is None:
        return state
    versions = dict(state.versions)
    next_id = state.next_version
    moved: dict[int, int] = {}
    steps = path(versions, call_tail.id)
    size = event.chunk_size
    start = steps[event.first_changed - 1].end if event.first_changed else 0
    for version, end in zip(steps[event.first_changed :], event.ends, strict=True):
        lo, hi = start // size, end // size
        run = event.keys[(lo - event.first_chunk) * KEY_BYTES : (hi - event.first_chunk) * KEY_BYTES]
        parent = moved.get(version.parent, version.parent)
        placed = replace(version, parent=parent, start=start, end=end, first_chunk=lo, keys=run)
        if version.mapped or parent != version.parent:
            placed = replace(placed, id=next_id)
            moved[version.id] = next_id
            next_id += 1
        versions[placed.id] = placed
        start = end
    state = replace(
        state,
        versions=versions,
        next_version=next_id,
        chunk_size=size,
        tools_end=event.tools_end,
    )
    return pruned(_follow(state, event, call_tail, moved)) if moved else state


def tail_of(state: ContextState, call_id: str, attempt: int) -> Version | None:
    """The tail of that attempt's prompt, while anything holds it.

    The newest, for a fork may have inherited one of a call of the same name.
    """
    flight = state.flight(call_id, attempt)
    if flight is not None:
        return state.versions[flight.tail]
    tag = tail_tag(call_id, attempt)
    tails = (v for v in state.versions.values() if v.index == TAIL_INDEX and v.digest == tag)
    return max(tails, key=lambda v: v.id, default=None)


def _follow(
    state: ContextState, event: CallMapped, call_tail: Version, moved: dict[int, int]
) -> ContextState:
    """Let the call, and the branch that took its list already, point at the copies."""
    flight = state.flight(event.call_id, event.attempt)
    old_tip, new_tip = call_tail.parent, moved.get(call_tail.parent, call_tail.parent)

    def copies(tails: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(moved.get(t, t) for t in tails)

    def took_it(branch: Branch) -> bool:
        if branch.tip != old_tip:
            return False
        if flight is None:
            return call_tail.id in branch.tails
        return flight.prefilled and not flight.stale and not branch.doubted_ns

    flights = tuple(
        replace(
            f,
            tip=new_tip,
            tail=moved[f.tail],
            tails=copies(f.tails),
            cut=moved.get(f.cut, f.cut),
        )
        if f is flight
        else f
        for f in state.flights
    )
    branches = tuple(
        replace(b, tip=new_tip, tails=copies(b.tails), closed_tip=moved.get(b.closed_tip, b.closed_tip))
        if took_it(b)
        else b
        for b in state.branches
    )
    return replace(state, flights=flights, branches=branches)


def placed_generation(state: ContextState, event: GenerationMapped) -> ContextState:
    """The tree with what a call generated, behind its tail and held by whoever held the tail."""
    if event.parent == ROOT:
        return state
    tail = state.versions[event.parent]
    tag = tail_tag(event.call_id, event.attempt, event.choice)
    known = next((v for v in state.versions.values() if v.parent == tail.id and v.digest == tag), None)
    generated = Version(
        known.id if known else state.next_version,
        tail.id,
        TAIL_INDEX,
        "generation",
        tag,
        tail.end,
        event.end,
        event.first_chunk,
        event.keys,
    )
    versions = {**state.versions, generated.id: generated}
    if known:
        return replace(state, versions=versions)

    def with_generation(tails: tuple[int, ...]) -> tuple[int, ...]:
        if tail.id not in tails and not any(versions[t].parent == tail.id for t in tails):
            return tails
        return (*(t for t in tails if t != tail.id), generated.id)

    return replace(
        state,
        versions=versions,
        next_version=state.next_version + 1,
        flights=tuple(replace(f, tails=with_generation(f.tails)) for f in state.flights),
        branches=tuple(replace(b, tails=with_generation(b.tails)) for b in state.branches),
    )


def ended_call(state: ContextState, event: CallEnded) -> ContextState:
    """The tree after a call: a completed one leaves its generation to its branch, another leaves nothing."""
    flight = state.flight(event.call_id, event.attempt)
    if flight is None:
        return state
    completed = event.end is CallEnd.COMPLETED
    branches = []
    for branch in state.branches:
        ours = branch.tip == flight.tip and flight.prefilled and not flight.stale and not branch.doubted_ns
        if ours and completed:
            branches.append(
                replace(
                    branch,
                    tails=(*branch.tails, *(t for t in flight.tails if t not in branch.tails)),
                    since_ns=event.at_ns,
                    wait=event.wait,
                    tool=event.tool,
                    eta=event.eta,
                    closed_tip=branch.tip,
                )
            )
        elif ours or (flight.stale and flight.prefilled and branch.tip == flight.cut):
            branches.append(replace(branch, since_ns=event.at_ns, closed_tip=branch.tip))
        else:
            branches.append(branch)
    state = replace(
        state,
        branches=tuple(branches),
        flights=tuple(f for f in state.flights if f is not flight),
        active_ns=event.at_ns,
    )
    if completed:
        state = replace(state, wait=event.wait, wait_tool=event.tool, wait_eta=event.eta)
    return pruned(state)


def editable_list(state: ContextState) -> Sequence[Version]:
    """The list that operations speak of: the current branch's, before the first one that of the last call."""
    branch = state.current_branch()
    if branch is not None:
        return list_path(state, branch.tip)
    if state.flights:
        return list_path(state, state.flights[-1].tip)
    return ()


def edited(state: ContextState, event: ListEdited) -> ContextState:
    """The tree after a declared edit: every version from `event.start` on is out, whoever continued it.

    Calls in flight keep what they compute with until they end. A pin whose message lives on behind the edit
    waits for its new version, holding the part of the prefix that is left. A generation outlives an edit of
    messages that are declared behind it.
    """
    messages = editable_list(state)
    base = state.declared_length if state.declared_length is not None else len(messages)
    length = max(base, event.end) - (event.end - event.start) + event.num_new
    dead_root = messages[event.start].id if event.start < len(messages) else None
    current = state.current_branch()

    def passes(tip: int) -> bool:
        return dead_root is not None and any(v.id == dead_root for v in path(state.versions, tip))

    def cut(tip: int) -> int:
        return state.versions[dead_root].parent if dead_root is not None and passes(tip) else tip

    branches: list[Branch] = []
    for branch in state.branches:
        if current is not None and branch.id == current.id:
            tip = cut(branch.tip)
            tails = branch.tails if event.start > len(messages) else ()
            branches.append(replace(branch, tip=tip, tails=tails, closed_tip=cut(branch.closed_tip)))
        elif not passes(branch.tip):
            branches.append(branch)
    shift = event.num_new - (event.end - event.start)
    pins: list[PinHold] = []
    for pin in state.pins:
        if pin.index >= event.end and (passes(pin.tip) or pin.moving):
            pins.append(replace(pin, tip=cut(pin.tip), index=pin.index + shift, moving=True))
        else:
            pins.append(pin)
    flights = tuple(
        replace(f, stale=True, cut=cut(f.cut if f.stale else f.tip)) if passes(f.tip) else f
        for f in state.flights
    )
    return pruned(
        replace(
            state,
            branches=tuple(branches),
            pins=tuple(pins),
            flights=flights,
            declared_length=length,
        )
    )
