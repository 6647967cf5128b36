"""Events of a KV namespace's stream: what the cache showed, and what was asked of it."""

from typing import TypeAlias

import msgspec

from lifecycle.core.directives import Directive, DirectiveResult
from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Tier


class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """What every event has: when it became true, in nanoseconds since the epoch."""

    at_ns: int


class ChunksConfirmed(LoggedEvent, frozen=True, kw_only=True, tag="chunks_confirmed.v1"):
    """The cache showed these keys. `stored` says that it reported the store during a call of ours."""

    namespace: Namespace
    keys: bytes
    tiers: tuple[Tier, ...]
    stored: bool = False


class ChunksGone(LoggedEvent, frozen=True, kw_only=True, tag="chunks_gone.v1"):
    """The cache no longer shows these keys in any tier."""

    namespace: Namespace
    keys: bytes
    reason: str = ""


class BackendLost(LoggedEvent, frozen=True, kw_only=True, tag="backend_lost.v1"):
    """An engine is gone, and with it what its own memory held for the contexts that it served.

    Chunks of theirs that lie in the cache's tiers stay what they are until the cache says otherwise.
    """

    namespace: Namespace
    backend: str
    reason: str = ""


class UntrackedForwarded(LoggedEvent, frozen=True, kw_only=True, tag="untracked_forwarded.v1"):
    """Inference went to this model and salt without being tracked: the chunks there are not ours alone."""

    namespace: Namespace
    reason: str


class HarmBudgetExceeded(LoggedEvent, frozen=True, kw_only=True, tag="harm_budget_exceeded.v1"):
    """Too much that we removed was needed again: this model and tenant only observe until rearmed.

    `regretted_tokens` against `prompt_tokens` of the last `window_seconds`, of which `allowed_tokens` would
    have been within the budget. `namespace` names the model only.
    """

    namespace: Namespace
    tenant: str
    regretted_tokens: int
    prompt_tokens: int
    allowed_tokens: int
    window_seconds: float


class EnforcementRearmed(LoggedEvent, frozen=True, kw_only=True, tag="enforcement_rearmed.v1"):
    """An operator set enforce again for a model and tenant whose harm budget had been exceeded."""

    namespace: Namespace
    tenant: str


class DirectiveProposed(LoggedEvent, frozen=True, kw_only=True, tag="directive_proposed.v1"):
    """The plan asks for this. `as_of` is the log position it was decided at."""

    directive: Directive
    as_of: int


class DirectiveSettled(LoggedEvent, frozen=True, kw_only=True, tag="directive_settled.v1"):
    """What became of it."""

    directive_id: str
    namespace: Namespace
    result: DirectiveResult


NamespaceEvent: TypeAlias = (
    ChunksConfirmed
    | ChunksGone
    | BackendLost
    | UntrackedForwarded
    | HarmBudgetExceeded
    | EnforcementRearmed
    | DirectiveProposed
    | DirectiveSettled
)
