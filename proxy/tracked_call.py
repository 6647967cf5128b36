"""One attempt of a call, as the data path sees it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine_bridge.mapping.ranges import MappedPrompt
from engine_bridge.verifier import Before, ComputedCall
from lifecycle.core.ids import Namespace
from lifecycle.core.observations import AnswerFact, Beside
from lifecycle.vocabulary import (
    CALL_HEADER,
    CONTEXT_HEADER,
    LIFECYCLE_ERROR_HEADER,
    MAPPING_HEADER,
    Arm,
    CallEnd,
    MappingKind,
    Mode,
    PrefixBreak,
)
from proxy.affinity import Placed
from proxy.answer_facts import AnswerFacts, Usage
from proxy.body_edit import ENGINE_EXTRA_ARGS, SESSION_ID
from proxy.followed_call import FollowedCall
from proxy.identity import Identity
from proxy.lifecycle_fields import LifecycleFields

REPORT_MODE = "kv_cache_report_mode"
"""An extra argument by which a call has the engine report blocks that it only found, too."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call that is to be tracked: who, what, and what it says of itself.

    `uid` names the context, or the one to be opened under that name; `harness` is the class of program that
    sent the call, `arm` how it runs. `awaits_plan` says that its body may
    carry a hint (one of several prompts cannot: it would be for all), or that an operation comes first.
    """

    tenant: str
    mode: Mode
    arm: Arm
    harness: str
    namespace: Namespace
    identity: Identity
    uid: str
    call_id: str
    awaits_plan: bool
    asked: FollowedCall
    fields: LifecycleFields


class Unmapped(msgspec.Struct, frozen=True):
    """Why a prompt's tokens are not known."""

    reason: str


class TrackedCall:
    """Where a call stands. Satisfies `CallObserver`: its methods hand on what they hear and return at once.

    `planned` is done when the plan of the call's arrival is recorded; `bypass_from_token` is then the
    admission hint that may ride, None for none. `sent` says that the body has left: hints after it are late.
    `asks_ids` says that the engine is asked for token ids; `answered` is done when its answer is over;
    `session_id` labels the attempt in the engine's events, empty for none; `before` is what the cache
    showed of its chunks before the answer. `placed` says which of several engines it is sent to, `backend`
    which one took it. `opens` says that it is a context's first call whose head nobody has compared yet,
    `beside` what was found then; `change` how its texts leave the last ones, None for unknown.
    """

    def __init__(
        self,
        request: CallRequest,
        heard_first_token: Callable[["TrackedCall"], None],
        heard_end: Callable[["TrackedCall", CallEnd, AnswerFacts, str], None],
    ) -> None:
        self.request = request
        self.uid = ""
        self.attempt = 0
        self.mapping_kind = MappingKind.NONE
        self.mapping: asyncio.Task[MappedPrompt | Unmapped] | None = None
        self.mapping_recorded = False
        self.bypass_from_token: int | None = None
        self.planned = asyncio.Event()
        self.posted = False
        self.asks_ids = False
        self.session_id = ""
        self.placed = Placed("")
        self.backend = ""
        self.before = Before()
        self.opens = False
        self.change: PrefixBreak | None = None
        self.beside: Beside | None = None
        self.answered: asyncio.Future[AnswerFacts] = asyncio.get_running_loop().create_future()
        self.sent = False
        self.answers: tuple[AnswerFact, ...] = ()
        self._heard_first_token = heard_first_token
        self._heard_end = heard_end

    def label(self) -> Mapping[str, object]:
        """Members of the body by which the engine labels what it reports of this call."""
        if not self.session_id:
            return {}
        field = self.request.asked.label_field
        return {field: self.session_id if field == SESSION_ID else {SESSION_ID: self.session_id}}

    def response_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """What we add to the answer's head."""
        headers = [
            (CONTEXT_HEADER.encode(), self.request.identity.context_id.encode()),
            (CALL_HEADER.encode(), self.request.call_id.encode()),
            (MAPPING_HEADER.encode(), self.mapping_kind.encode()),
        ]
        if self.request.fields.errors:
            headers.append((LIFECYCLE_ERROR_HEADER.encode(), self.request.fields.error_header()))
        return headers

    def on_head(self, status: int) -> None:
        """The engine's answer begins; nothing follows from it."""

    def on_first_token(self) -> None:
        """The prompt is computed."""
        self._heard_first_token(self)

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        """The call is over."""
        self._heard_end(self, end, facts, reason)


def can_be_labelled(asked: FollowedCall) -> bool:
    """Whether a label of ours would tell what the call computed: it has none, asks for no others, and shares
    its request with no other prompt."""
    extra = asked.document.get(ENGINE_EXTRA_ARGS)
    if asked.num_prompts > 1 or (isinstance(extra, dict) and REPORT_MODE in extra):
        return False
    return bool(asked.label_field) and asked.document.get(asked.label_field) is None


def computed_call(call: TrackedCall, mapped: MappedPrompt, end: CallEnd, usage: Usage) -> ComputedCall:
    """What a call that is over had the engine compute."""
    return ComputedCall(
        uid=call.uid,
        call_id=call.request.call_id,
        attempt=call.attempt,
        namespace=call.request.namespace,
        keys=mapped.chunk_keys,
        token_ids=mapped.token_ids,
        num_tokens=mapped.num_tokens,
        chunk_size=mapped.chunk_tokens,
        before=call.before,
        session_id=call.session_id,
        cached_tokens=-1 if usage.cached_tokens is None else usage.cached_tokens,
        completed=end is CallEnd.COMPLETED,
        output_tokens=usage.completion_tokens,
        num_choices=call.request.asked.num_choices,
        stored_limit=call.bypass_from_token,
    )
