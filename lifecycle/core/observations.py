"""Observations: what the shell saw. Nothing here is believed until `decide` has turned it into events.

Every observation carries `at_ns`, nanoseconds since the epoch; the core uses the later of it and the last.
"""

from typing import TypeAlias

import msgspec

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import (
    Arm,
    CallEnd,
    IdentityRung,
    MappingKind,
    OutcomeResult,
    PrefixBreak,
    WaitKind,
)

Span: TypeAlias = tuple[int, int]
"""Half-open `[start, end)` of indices into the client's own message list."""

SpanName: TypeAlias = Span | str
"""A span, or `"system"` or `"tools"`: the head, addressed by name."""


class _Operation(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    seq: int
    ctx: str


class AppendMessages(_Operation, frozen=True, kw_only=True, tag="append"):
    """`n` messages were added at the end of the list."""

    n: int


class ReplaceMessages(_Operation, frozen=True, kw_only=True, tag="replace"):
    """The messages of `span` gave way to `n` new ones."""

    span: Span
    n: int


class RemoveMessages(_Operation, frozen=True, kw_only=True, tag="remove"):
    """The messages of `span` are gone."""

    span: Span


class _Opening(_Operation, frozen=True, kw_only=True):
    """`agent` and `flow` are the labels of the context that begins, as a call's are."""

    agent: str | None = None
    flow: str | None = None


class ForkContext(_Opening, frozen=True, kw_only=True, tag="fork"):
    """`ctx` begins as the first `upto` messages of `parent`; without `upto`, all of them."""

    parent: str
    upto: int | None = None


class SpawnContext(_Opening, frozen=True, kw_only=True, tag="spawn"):
    """`ctx` begins empty; parentage is a hint, never proof of shared KV."""

    parent: str | None = None


class MarkOneOff(_Opening, frozen=True, kw_only=True, tag="one_off"):
    """`ctx` serves a single inference."""


class PinSpan(_Operation, frozen=True, kw_only=True, tag="pin"):
    """Hold the chain from the list's start to the end of `span` for `ttl` seconds."""

    span: SpanName
    ttl: float | None = None
    priority: int | None = None


class UnpinSpan(_Operation, frozen=True, kw_only=True, tag="unpin"):
    """Back to the ordinary state."""

    span: SpanName


class DeclareWaiting(_Operation, frozen=True, kw_only=True, tag="waiting"):
    """What the agent waits for; `eta` in seconds."""

    kind: WaitKind
    tool: str | None = None
    eta: float | None = None


class DeclareOutcome(_Operation, frozen=True, kw_only=True, tag="outcome"):
    """What became of the work that the span stood for."""

    span: Span
    result: OutcomeResult


class DeclareResumed(_Operation, frozen=True, kw_only=True, tag="resumed"):
    """The wait is over; a call follows soon."""


class CloseContext(_Operation, frozen=True, kw_only=True, tag="close"):
    """The context is over."""


Operation: TypeAlias = (
    AppendMessages
    | ReplaceMessages
    | RemoveMessages
    | ForkContext
    | SpawnContext
    | MarkOneOff
    | PinSpan
    | UnpinSpan
    | DeclareWaiting
    | DeclareOutcome
    | DeclareResumed
    | CloseContext
)


class MessageFact(msgspec.Struct, frozen=True, array_like=True):
    """What we keep of a message: a keyed digest of its canonical form and its role. Never its text."""

    digest: bytes
    role: str


class AnswerFact(msgspec.Struct, frozen=True):
    """What we keep of an answer, so that whoever gets the next call knows it when it comes back.

    `echo` is a keyed digest of it as far as clients reproduce it, `tool_calls` the ids of the calls it makes.
    """

    echo: bytes = b""
    tool_calls: tuple[str, ...] = ()


class PinRequest(msgspec.Struct, frozen=True):
    """A pin or unpin that rode on a call."""

    span: SpanName
    ttl: float | None = None
    release: bool = False


class _Observation(msgspec.Struct, frozen=True, kw_only=True):
    at_ns: int


class ContextOpened(_Observation, frozen=True, kw_only=True):
    """A context is needed that does not exist yet.

    `parent_state` is set by the tracker for a fork whose parent is known, of the same tenant and in the same
    namespace; otherwise the context starts empty and `parent` stays a hint.
    """

    uid: str
    tenant: str
    context_id: str
    namespace: Namespace
    rung: IdentityRung
    reason: str = ""
    parent: str = ""
    fork: bool = False
    upto: int | None = None
    one_off: bool = False
    agent: str = ""
    flow: str = ""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """A new context's head is another one's but for little: context `uid` has one that differs by `kind`.

    `shared_tokens` are those of both heads' whole chunks that are the same, `lost_tokens` those that are not;
    -1 where either is not known. `index` and `role` as in `PrefixDiverged`.
    """

    uid: str
    kind: PrefixBreak
    index: int
    role: str = ""
    shared_tokens: int = -1
    lost_tokens: int = -1


class PromptMapping(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one prompt, by message.

    `message_ends[i]` is the token position at which message i ends (monotone); `head_end` where the head
    ends; `[message_ends[-1], num_tokens)` is the generation prompt. `chunk_keys` is the run of keys of every
    full chunk of `chunk_size` tokens. With `kind` NONE only `reason` counts of these.

    `change` is how the texts differ where the list leaves its context's last one, None if they do not or are
    not at hand; `beside` another context's head, where this one is a context's first.
    """

    kind: MappingKind
    reason: str = ""
    num_tokens: int = 0
    head_end: int = 0
    tools_end: int = 0
    message_ends: tuple[int, ...] = ()
    chunk_size: int = 0
    chunk_keys: bytes = b""
    change: PrefixBreak | None = None
    beside: Beside | None = None


class CallMapping(_Observation, frozen=True, kw_only=True):
    """The prompt of a call in tokens. What the tenant may still pin at that time: None is without limit."""

    call_id: str
    attempt: int
    mapping: PromptMapping
    bytes_per_token: int = 0
    budget_left_bytes: int | None = None
    pins_left: int | None = None


class CallArrival(_Observation, frozen=True, kw_only=True):
    """A call reached the proxy. `head` digests everything the template sees besides the messages.

    `rung` and `reason` say how it was told that the call is one of this context. `proxy` names the process
    that forwards it; the tracker fills it in. `mapping` is what a `CallMapping` of it would say, where that
    is known by now; its `attempt` does not count. `normalised` names what changed its text on the way.
    """

    call_id: str
    head: bytes
    messages: tuple[MessageFact, ...]
    streamed: bool = True
    num_choices: int = 1
    closes: bool = False
    one_off: bool = False
    pins: tuple[PinRequest, ...] = ()
    wait: WaitKind | None = None
    tool: str = ""
    eta: float | None = None
    source: str = ""
    seq: int | None = None
    arm: Arm | None = None
    harness: str = ""
    proxy: str = ""
    backend: str = ""
    placed: str = ""
    normalised: tuple[str, ...] = ()
    mapping: CallMapping | None = None
    rung: IdentityRung | None = None
    reason: str = ""


class FirstToken(_Observation, frozen=True, kw_only=True):
    """The first token of any choice came back: the prompt is computed.

    `max_branches` is how many the context may have; None is without limit.
    """

    call_id: str
    attempt: int
    max_branches: int | None = None


class CallEnding(_Observation, frozen=True, kw_only=True):
    """A call is over. Token counts are the engine's own; -1 when it did not say. `max_branches` as above."""

    call_id: str
    attempt: int
    end: CallEnd
    wait: WaitKind = WaitKind.UNKNOWN
    tool: str = ""
    finish_reason: str = ""
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    detail: str = ""
    max_branches: int | None = None
    answers: tuple[AnswerFact, ...] = ()
    backend: str = ""


class GenerationKeys(_Observation, frozen=True, kw_only=True):
    """The engine's own events told which tokens a call generated: the keys of the chunks they fill.

    `chain` is the whole run of keys from token 0; `num_tokens` the prompt and the generated tokens together.
    """

    call_id: str
    attempt: int
    choice: int
    num_tokens: int
    chain: bytes
    chunk_size: int


class OperationReceived(_Observation, frozen=True, kw_only=True):
    """One declared operation of `source`."""

    source: str
    operation: Operation
    bytes_per_token: int = 0
    budget_left_bytes: int | None = None
    pins_left: int | None = None


class VerificationResult(_Observation, frozen=True, kw_only=True):
    """Whether the keys computed for a call were the cache's own. Empty `reason`: they were.

    The cache has shown `num_shown` of the `num_chunks` chunks that the call may have stored; 0 of 0 if it
    could not be asked.
    """

    reason: str = ""
    call_id: str = ""
    attempt: int = 0
    num_chunks: int = 0
    num_shown: int = 0


class CloseRequested(_Observation, frozen=True, kw_only=True):
    """Somebody with authority ended the context."""

    reason: str


class PinsDropped(_Observation, frozen=True, kw_only=True):
    """Somebody with authority ended every pin of the context."""

    reason: str


class Tick(_Observation, frozen=True, kw_only=True):
    """Time passed."""


Observation: TypeAlias = (
    CallArrival
    | CallMapping
    | FirstToken
    | CallEnding
    | GenerationKeys
    | OperationReceived
    | VerificationResult
    | CloseRequested
    | PinsDropped
    | Tick
)
