"""Which context a call belongs to: what the client said, else its harness, else what its messages tell.

The answer always names its rung and its reason, so that every decision can be read back.
"""

import msgspec

from lifecycle.vocabulary import IdentityRung
from proxy.followed_call import FollowedCall
from proxy.harness_identity import NOTHING_SAID, HarnessCall
from proxy.inference import Inference
from proxy.known_lists import LineageMatch, Relation, Standing
from proxy.lifecycle_fields import LifecycleFields
from proxy.lineage import ANSWER_RETURNED, BY_BEGINNING, ONE_OFF_WENT_ON, LineageIndex
from proxy.list_chains import num_head

__all__ = ["Identity", "LineageIndex", "identify"]

_TURNS = frozenset({Relation.CONTINUES, Relation.RETRIES, Relation.EDITS})


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The context of a call.

    An empty `context_id` asks for a new context under a fresh name. `parent` and `fork_at` count only where
    the context is created: with `fork_at` it begins as the parent's first that many messages, without it is a
    spawn. `one_off` says that the call serves itself alone. `relation` says what the call does with the
    context that was found, `ends` names a context that is over with it.
    """

    rung: IdentityRung
    reason: str
    context_id: str = ""
    parent: str = ""
    fork_at: int | None = None
    one_off: bool = False
    relation: Relation = Relation.UNRELATED
    ends: str = ""


def identify(
    tenant: str,
    fields: LifecycleFields,
    call: FollowedCall,
    index: LineageIndex,
    said: HarnessCall = NOTHING_SAID,
    texts: Inference | None = None,
) -> Identity:
    """Decide. Pure: whoever acts on the answer tells the index (`observe_call`).

    A one-off without a name is always a context of its own; lineage then only says whose list it extends.
    """
    if fields.ctx:
        return Identity(
            rung=IdentityRung.EXPLICIT,
            reason=fields.origin.value,
            context_id=fields.ctx,
            parent=fields.parent,
            fork_at=fields.fork_at,
            one_off=fields.one_off,
        )
    if fields.parent:
        return Identity(
            rung=IdentityRung.NEW,
            reason="declared_parent",
            parent=fields.parent,
            fork_at=fields.fork_at,
            one_off=fields.one_off,
        )
    if said.context_id:
        return _named(tenant, fields, call, index, said, texts)
    match = index.find(tenant, call, said.groups)
    if fields.one_off:
        return _declared_one_off(match)
    if match.relation in _TURNS and not match.lost_tools:
        begins = match.relation is Relation.EDITS and match.shared <= num_head(call.messages)
        summary = texts.summary(tenant, call, said.groups) if begins and texts is not None else None
        if summary is not None and summary.context_id == match.context_id:
            reason = f"{match.reason}; {summary.reason}"
            match = msgspec.structs.replace(match, relation=summary.relation, reason=reason)
        return _of_lineage(match, said)
    if match.relation in _TURNS:
        return Identity(
            rung=IdentityRung.INFERENCE,
            reason=f"{match.reason}; its tools are gone",
            parent=match.context_id,
            one_off=True,
            relation=Relation.ONE_OFF,
        )
    found = None
    if match.relation is Relation.UNRELATED and match.reason != ONE_OFF_WENT_ON and texts is not None:
        found = texts.find(tenant, call, said.groups)
    elif match.reason == BY_BEGINNING and match.shared <= num_head(call.messages) + 1 and texts is not None:
        # A summary may stand behind the first message; what shares more than that is a fork.
        found = texts.summary(tenant, call, said.groups)
    if found is not None:
        turn = found.relation is Relation.COMPACTS
        return Identity(
            rung=IdentityRung.INFERENCE,
            reason=found.reason,
            context_id=found.context_id if turn else "",
            parent="" if turn else found.context_id,
            one_off=found.relation is Relation.ONE_OFF,
            relation=found.relation,
        )
    return _of_lineage(match, said)


def _of_lineage(match: LineageMatch, said: HarnessCall) -> Identity:
    rung = IdentityRung.GROUP if said.groups else IdentityRung.LINEAGE
    if match.relation is Relation.UNRELATED:
        return Identity(rung=IdentityRung.NEW, reason=match.reason)
    if match.relation is Relation.ONE_OFF:
        return Identity(
            rung=IdentityRung.INFERENCE,
            reason=match.reason,
            parent=match.context_id,
            one_off=True,
            relation=match.relation,
        )
    if match.relation is Relation.FORKS:
        return Identity(
            rung=rung,
            reason=match.reason,
            parent=match.context_id,
            fork_at=match.shared,
            relation=match.relation,
        )
    return Identity(rung=rung, reason=match.reason, context_id=match.context_id, relation=match.relation)


def _declared_one_off(match: LineageMatch) -> Identity:
    known = match.relation is not Relation.UNRELATED and match.shared > 0
    # The answer that came back is the last message of the parent's list.
    shared = match.shared + (match.relation is Relation.CONTINUES and match.reason in ANSWER_RETURNED)
    return Identity(
        rung=IdentityRung.NEW,
        reason="one_off",
        parent=match.context_id if known else "",
        fork_at=shared if known else None,
        one_off=True,
        relation=match.relation,
    )


def _named(
    tenant: str,
    fields: LifecycleFields,
    call: FollowedCall,
    index: LineageIndex,
    said: HarnessCall,
    texts: Inference | None,
) -> Identity:
    """A harness named the session. Not each of a session's calls is one of the context's turns: it is none
    where the harness says so, or where the call lacks what the context's calls have."""
    standing = index.standing(tenant, said.context_id, call, said.window)
    if fields.one_off:
        return _one_off_beside(said, standing, "declared a one-off")
    if said.compacts:
        return _one_off_beside(said, standing, "asks for a summary")
    if said.final and not (standing is not None and standing.goes_on):
        last = _one_off_beside(said, standing, "the session's last word")
        return msgspec.structs.replace(last, ends=said.context_id)
    if standing is None:
        return _opening(tenant, call, index, said)
    if standing.lost_tools or (standing.has_tools and standing.other_system and not standing.goes_on):
        return _aside(tenant, call, index, said, standing)
    reason, relation = said.told_by, _turn(standing)
    if standing.other_window:
        reason, relation = f"{reason}; another window", Relation.COMPACTS
    elif relation is Relation.EDITS and not standing.goes_on and texts is not None:
        found = texts.summary(tenant, call, said.groups)
        if found is not None and found.context_id == said.context_id:
            reason, relation = f"{reason}; {found.reason}", found.relation
    return Identity(rung=said.rung, reason=reason, context_id=said.context_id, relation=relation)


def _turn(standing: Standing) -> Relation:
    if not standing.whole:
        return Relation.EDITS
    return Relation.CONTINUES if standing.longer else Relation.RETRIES


def _opening(tenant: str, call: FollowedCall, index: LineageIndex, said: HarnessCall) -> Identity:
    """The first call under a name. What it shares with a declared parent is proven by its list alone."""
    opening = Identity(
        rung=said.rung,
        reason=f"{said.told_by}; resumed" if said.resumes else said.told_by,
        context_id=said.context_id,
        parent=said.parent,
    )
    if not said.parent:
        return opening
    parent = index.standing(tenant, said.parent, call)
    if parent is not None and parent.goes_on and parent.same_head:
        return msgspec.structs.replace(opening, fork_at=parent.shared, relation=Relation.FORKS)
    if said.forks:
        opening = msgspec.structs.replace(opening, reason=f"{said.told_by}; a fork that shares no message")
    return msgspec.structs.replace(opening, relation=Relation.SUBAGENT)


def _aside(
    tenant: str, call: FollowedCall, index: LineageIndex, said: HarnessCall, standing: Standing
) -> Identity:
    """A call of the session that is none of the context's: alone, or one of another context beside it."""
    match = index.find(tenant, call, said.groups)
    if match.relation in _TURNS and match.context_id != said.context_id:
        reason = f"{said.told_by}; beside it: {match.reason}"
        return Identity(
            rung=IdentityRung.LINEAGE, reason=reason, context_id=match.context_id, relation=match.relation
        )
    if match.reason == ONE_OFF_WENT_ON or not (standing.lost_tools or said.probes):
        why = match.reason if standing.lost_tools else "other instructions, and no message of it"
        return Identity(
            rung=IdentityRung.INFERENCE,
            reason=f"{said.told_by}; beside it: {why}",
            parent=said.context_id,
            relation=Relation.SUBAGENT,
        )
    return _one_off_beside(said, standing, "without its tools" if standing.lost_tools else "a single token")


def _one_off_beside(said: HarnessCall, standing: Standing | None, why: str) -> Identity:
    shares = standing is not None and standing.goes_on and standing.same_head
    return Identity(
        rung=said.rung,
        reason=f"{said.told_by}; beside it: {why}",
        parent=said.context_id,
        fork_at=standing.shared if standing is not None and shares else None,
        one_off=True,
        relation=Relation.ONE_OFF,
    )
