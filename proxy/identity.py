"""Which context a call belongs to: what the client said, else what its messages tell.

The answer always names its rung and its reason, so that every decision can be read back.
"""

import msgspec

from lifecycle.vocabulary import IdentityRung
from proxy.followed_call import FollowedCall
from proxy.lifecycle_fields import LifecycleFields
from proxy.lineage import ANSWER_RETURNED, LineageIndex, LineageMatch, Relation

__all__ = ["Identity", "LineageIndex", "identify"]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The context of a call.

    An empty `context_id` asks for a new context under a fresh name. `parent` and `fork_at` count only where
    the context is created: with `fork_at` it begins as the parent's first that many messages, without it is a
    spawn. `relation` says how the list stands to the one that lineage found, if lineage was asked.
    """

    rung: IdentityRung
    reason: str
    context_id: str = ""
    parent: str = ""
    fork_at: int | None = None
    one_off: bool = False
    relation: Relation = Relation.UNRELATED


def identify(tenant: str, fields: LifecycleFields, call: FollowedCall, index: LineageIndex) -> Identity:
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
    match = index.find(tenant, call)
    if fields.one_off:
        return _one_off(match)
    if match.relation is Relation.UNRELATED:
        return Identity(rung=IdentityRung.NEW, reason=match.reason)
    if match.relation is Relation.FORKS:
        return Identity(
            rung=IdentityRung.LINEAGE,
            reason=match.reason,
            parent=match.context_id,
            fork_at=match.shared,
            relation=match.relation,
        )
    return Identity(
        rung=IdentityRung.LINEAGE,
        reason=match.reason,
        context_id=match.context_id,
        relation=match.relation,
    )


def _one_off(match: LineageMatch) -> Identity:
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
