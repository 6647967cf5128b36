"""Where a call's list meets the tree of known versions, and which branch it goes on with."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from lifecycle.core.observations import MessageFact
from lifecycle.core.state import ROOT, TAIL_INDEX, Branch, ContextState, Version, path


class Match(msgspec.Struct, frozen=True):
    """`kept` is the deepest known version on the list's path (`ROOT`: none, not even the head).

    `num_kept` counts the client's messages up to it. `branch` is the branch the list goes on with, or, if it
    `diverges`, the one it leaves at `kept`; None in a context without branches.
    """

    kept: int
    num_kept: int
    branch: Branch | None
    diverges: bool


def match_list(state: ContextState, head: bytes, messages: Sequence[MessageFact]) -> Match:
    """Descend the tree along the list's digests; among equals the newest version wins.

    The list goes on with a branch if the branch's whole list lies on its path. Of several, the longest, the
    open before the doubted, the latest. If there is none, it diverges from the branch it shares most with.
    """
    kept, num_kept = _deepest(state, head, messages)
    on_path = {v.id: depth for depth, v in enumerate(path(state.versions, kept))} if kept != ROOT else {}

    def shared(branch: Branch) -> int:
        return max((on_path.get(v.id, -1) for v in path(state.versions, branch.tip)), default=-1)

    def rank(branch: Branch) -> tuple[int, bool, int, int]:
        return shared(branch), not branch.doubted_ns, branch.since_ns, branch.id

    going_on = [b for b in state.branches if b.tip in on_path]
    if going_on:
        return Match(kept, num_kept, max(going_on, key=rank), diverges=False)
    if state.branches:
        return Match(kept, num_kept, max(state.branches, key=rank), diverges=True)
    return Match(kept, num_kept, None, diverges=False)


def _deepest(state: ContextState, head: bytes, messages: Sequence[MessageFact]) -> tuple[int, int]:
    """Deepest version whose path spells the list's beginning, and how many messages that covers.

    Siblings may carry the same digest (the same message, rendered otherwise), so a frontier is kept.
    """
    children: dict[int, list[Version]] = defaultdict(list)
    for version in state.versions.values():
        if version.index != TAIL_INDEX:
            children[version.parent].append(version)
    frontier = [v.id for v in children.get(ROOT, ()) if v.digest == head]
    if not frontier:
        return ROOT, 0
    for depth, message in enumerate(messages):
        digest = message.digest
        following = [c.id for v in frontier for c in children.get(v, ()) if c.digest == digest]
        if not following:
            return max(frontier), depth
        frontier = following
    return max(frontier), len(messages)
