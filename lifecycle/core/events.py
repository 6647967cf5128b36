"""Events: what became true, in order. The log holds nothing else, and no text and no token ids.

Frozen, tagged, versioned. A new field is optional; a changed meaning is a new `.v2` tag and an `upcast`.
Everybody takes them from here, those of a KV namespace too.
"""

from typing import TypeAlias

import msgspec

from lifecycle.core.ids import Namespace
from lifecycle.core.namespace_events import BackendLost as BackendLost
from lifecycle.core.namespace_events import ChunksConfirmed as ChunksConfirmed
from lifecycle.core.namespace_events import ChunksGone as ChunksGone
from lifecycle.core.namespace_events import DirectiveProposed as DirectiveProposed
from lifecycle.core.namespace_events import DirectiveSettled as DirectiveSettled
from lifecycle.core.namespace_events import EnforcementRearmed as EnforcementRearmed
from lifecycle.core.namespace_events import HarmBudgetExceeded as HarmBudgetExceeded
from lifecycle.core.namespace_events import LoggedEvent
from lifecycle.core.namespace_events import NamespaceEvent as NamespaceEvent
from lifecycle.core.namespace_events import UntrackedForwarded as UntrackedForwarded
from lifecycle.core.observations import AnswerFact, MessageFact, Operation, PinRequest
from lifecycle.core.prefix_events import PrefixDiverged as PrefixDiverged
from lifecycle.core.state import Version
from lifecycle.vocabulary import Arm, CallEnd, IdentityRung, MappingKind, OutcomeResult, WaitKind

# -- one context's stream ---------------------------------------------------------------------------------


class ContextCreated(LoggedEvent, frozen=True, kw_only=True, tag="context_created.v1"):
    """A context began. `inherited` are the versions a fork took over, in tree order."""

    uid: str
    tenant: str
    context_id: str
    namespace: Namespace
    rung: IdentityRung
    reason: str = ""
    parent_uid: str = ""
    forked: bool = False
    fork_at: int = -1
    one_off: bool = False
    agent: str = ""
    flow: str = ""
    inherited: tuple[Version, ...] = ()
    inherited_tip: int = -1
    inherited_tails: tuple[int, ...] = ()
    chunk_size: int = 0
    tools_end: int = 0


class OperationApplied(LoggedEvent, frozen=True, kw_only=True, tag="operation_applied.v1"):
    """`seq` of `source` took effect; what it changed stands in the events after it."""

    source: str
    operation: Operation


class OperationHeld(LoggedEvent, frozen=True, kw_only=True, tag="operation_held.v1"):
    """`seq` of `source` came before its predecessor and waits for it."""

    source: str
    operation: Operation


class OperationRejected(LoggedEvent, frozen=True, kw_only=True, tag="operation_rejected.v1"):
    """`seq` of `source` is consumed and changed nothing."""

    source: str
    seq: int
    reason: str


class ListEdited(LoggedEvent, frozen=True, kw_only=True, tag="list_edited.v1"):
    """Messages `[start, end)` gave way to `num_new`; every version from `start` on is out at once."""

    start: int
    end: int
    num_new: int


class ListGrown(LoggedEvent, frozen=True, kw_only=True, tag="list_grown.v1"):
    """`num_new` messages were declared at the end."""

    num_new: int


class DeclarationMismatched(LoggedEvent, frozen=True, kw_only=True, tag="declaration_mismatched.v1"):
    """The list has not the declared length: inference takes over for it."""

    call_id: str
    expected: int
    actual: int


class CallArrived(LoggedEvent, frozen=True, kw_only=True, tag="call_arrived.v1"):
    """A call's list: the path to version `kept` goes on with `messages`.

    `branch` is the branch the list goes on with, or leaves at `kept` if it `diverges`; -1 for a first one.
    `concurrent` says that another call was in flight then. `source` and `seq` name the last operation that
    was sent before the call. `num_messages` is the length of the whole list, 0 where it was not recorded.
    `arm` is how the call ran, None if nobody said; `harness` the class of program that sent it; `proxy` the
    process that forwards it, empty where it was not recorded. `backend` is the engine it goes to, and
    `placed` why, both empty where there is but one engine. `rung` and `reason` say how it was told that the
    call is one of this context, None and empty where it was not recorded. `normalised` names what changed the
    call's text on the way to the engine, and in these digests.
    """

    call_id: str
    attempt: int
    kept: int
    head: bytes = b""
    messages: tuple[MessageFact, ...] = ()
    branch: int = -1
    diverges: bool = False
    concurrent: bool = False
    streamed: bool = True
    num_choices: int = 1
    one_off: bool = False
    closes: bool = False
    pins: tuple[PinRequest, ...] = ()
    wait: WaitKind | None = None
    tool: str = ""
    eta: float | None = None
    source: str = ""
    seq: int = 0
    arm: Arm | None = None
    harness: str = ""
    num_messages: int = 0
    proxy: str = ""
    backend: str = ""
    placed: str = ""
    normalised: tuple[str, ...] = ()
    rung: IdentityRung | None = None
    reason: str = ""


class CallMapped(LoggedEvent, frozen=True, kw_only=True, tag="call_mapped.v1"):
    """Token ranges of a call's path from position `first_changed` on (0 is the head, the last the tail).

    `ends` are their token ends, `keys` the keys of every full chunk from `first_chunk` on. `bytes_per_token`
    is the size of a token's KV in the cache, 0 if unknown.
    """

    call_id: str
    attempt: int
    kind: MappingKind
    reason: str = ""
    num_tokens: int = 0
    tools_end: int = 0
    chunk_size: int = 0
    first_changed: int = 0
    ends: tuple[int, ...] = ()
    first_chunk: int = 0
    keys: bytes = b""
    bytes_per_token: int = 0


class PrefillDone(LoggedEvent, frozen=True, kw_only=True, tag="prefill_done.v1"):
    """The call's prompt is computed; its list is the context's from now on."""

    call_id: str
    attempt: int


class CallEnded(LoggedEvent, frozen=True, kw_only=True, tag="call_ended.v1"):
    """The call is over. Token counts are the engine's; -1 when it did not say. `answers` are its choices.

    `backend` is the engine that answered where that is another one than the call was sent to.
    """

    call_id: str
    attempt: int
    end: CallEnd
    wait: WaitKind = WaitKind.UNKNOWN
    tool: str = ""
    eta: float | None = None
    finish_reason: str = ""
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    detail: str = ""
    answers: tuple[AnswerFact, ...] = ()
    backend: str = ""


class GenerationMapped(LoggedEvent, frozen=True, kw_only=True, tag="generation_mapped.v1"):
    """Chunks filled by generated tokens, behind the prompt's tail version `parent`.

    A generation that became known after its branch had moved on has `parent` -1: it is dead on arrival and
    `prefix` is the run of keys before `keys`.
    """

    call_id: str
    attempt: int
    choice: int
    parent: int
    end: int
    first_chunk: int
    keys: bytes
    prefix: bytes = b""


class BranchOpened(LoggedEvent, frozen=True, kw_only=True, tag="branch_opened.v1"):
    """A call's list became a branch of its own."""

    branch: int
    call_id: str
    attempt: int


class BranchAdvanced(LoggedEvent, frozen=True, kw_only=True, tag="branch_advanced.v1"):
    """A call's list became the branch's list. What it had generated before is doubtful as `leftover`."""

    branch: int
    call_id: str
    attempt: int
    leftover: int = -1


class BranchDoubted(LoggedEvent, frozen=True, kw_only=True, tag="branch_doubted.v1"):
    """The context went on elsewhere; nobody said that this branch is over."""

    branch: int
    reason: str


class BranchRestored(LoggedEvent, frozen=True, kw_only=True, tag="branch_restored.v1"):
    """A doubted branch came back."""

    branch: int


class BranchExpired(LoggedEvent, frozen=True, kw_only=True, tag="branch_expired.v1"):
    """The branch is over; what only it held is dead."""

    branch: int
    reason: str


class PinSet(LoggedEvent, frozen=True, kw_only=True, tag="pin_set.v1"):
    """The chain to version `tip` is held until `until_ns`. The same `pin_id` again renews the lease."""

    pin_id: str
    tip: int
    index: int
    until_ns: int
    size_bytes: int = 0
    priority: int | None = None


class PinMoved(LoggedEvent, frozen=True, kw_only=True, tag="pin_moved.v1"):
    """The pinned message materialised behind a new prefix."""

    pin_id: str
    tip: int
    index: int
    size_bytes: int = 0


class PinRefused(LoggedEvent, frozen=True, kw_only=True, tag="pin_refused.v1"):
    """A pin that rode on a call was not granted."""

    span: str
    reason: str


class PinReleased(LoggedEvent, frozen=True, kw_only=True, tag="pin_released.v1"):
    """The hold ended."""

    pin_id: str
    reason: str


class WaitDeclared(LoggedEvent, frozen=True, kw_only=True, tag="wait_declared.v1"):
    """The agent said what it waits for; `eta` in seconds."""

    kind: WaitKind
    tool: str = ""
    eta: float | None = None


class ContextResumed(LoggedEvent, frozen=True, kw_only=True, tag="context_resumed.v1"):
    """The agent said that the wait is over."""


class OutcomeDeclared(LoggedEvent, frozen=True, kw_only=True, tag="outcome_declared.v1"):
    """The agent said what became of the work that `[start, end)` stood for."""

    start: int
    end: int
    result: OutcomeResult


class TrackingGapOpened(LoggedEvent, frozen=True, kw_only=True, tag="tracking_gap_opened.v1"):
    """Something is missing: calls go on, nothing of this context expires until a full render healed it."""

    reason: str


class TrackingGapHealed(LoggedEvent, frozen=True, kw_only=True, tag="tracking_gap_healed.v1"):
    """A full render showed the whole list."""


class ContextUnmapped(LoggedEvent, frozen=True, kw_only=True, tag="context_unmapped.v1"):
    """The context's tokens are not known, or not the cache's own."""

    reason: str


class ContextVerified(LoggedEvent, frozen=True, kw_only=True, tag="context_verified.v1"):
    """The cache itself showed the keys computed for a call."""


class CallVerified(LoggedEvent, frozen=True, kw_only=True, tag="call_verified.v1"):
    """The cache was asked for what a call may have stored of its prompt: it has shown `num_shown` of
    `num_chunks` chunks, now or before."""

    call_id: str
    attempt: int
    num_chunks: int
    num_shown: int


class ContextClosed(LoggedEvent, frozen=True, kw_only=True, tag="context_closed.v1"):
    """The context is over; only pins hold what they hold."""

    reason: str


ContextEvent: TypeAlias = (
    ContextCreated
    | OperationApplied
    | OperationHeld
    | OperationRejected
    | ListEdited
    | ListGrown
    | DeclarationMismatched
    | CallArrived
    | CallMapped
    | PrefixDiverged
    | PrefillDone
    | CallEnded
    | GenerationMapped
    | BranchOpened
    | BranchAdvanced
    | BranchDoubted
    | BranchRestored
    | BranchExpired
    | PinSet
    | PinMoved
    | PinRefused
    | PinReleased
    | WaitDeclared
    | ContextResumed
    | OutcomeDeclared
    | TrackingGapOpened
    | TrackingGapHealed
    | ContextUnmapped
    | ContextVerified
    | CallVerified
    | ContextClosed
)

Event: TypeAlias = ContextEvent | NamespaceEvent


class RecordedEvent(msgspec.Struct, frozen=True):
    """An event as the log holds it: `version` counts from 1 in the stream, `position` over the whole log."""

    stream: str
    version: int
    position: int
    event: Event
