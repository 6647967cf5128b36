"""A call's prompt in tokens: by template and tokenizer, by the engine's ids, or the reason why not."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
import structlog

from engine_bridge.errors import BridgeError, Unmappable
from engine_bridge.mapping.ranges import MappedPrompt
from lifecycle.core.observations import PromptMapping
from lifecycle.vocabulary import MappingKind
from proxy.followed_call import FollowedCall
from proxy.models import MappedModel
from proxy.prefix_lint import PrefixLint
from proxy.tracked_call import TrackedCall, Unmapped

log = structlog.get_logger(__name__)

NOT_CONFIGURED = "the model is not configured"
START_SECONDS = 20.0
"""How long after a start, from the first call on, calls wait to be mapped; the body has left long before."""

MAX_WAITING_BYTES = 32 * 2**20
"""Bodies whose prompts are being mapped at a time, or wait to be. New ones take some 0.15 s of a processor a
megabyte: what came later would be known when the answer is long over, and calls would wait behind it all."""

NOT_TOLD = "the engine did not answer with token ids"
NO_IDS = "the engine does not tell this call's token ids apart"


class PromptMapper:
    """Maps the prompts of all configured models. Never raises: what goes wrong is a reason."""

    def __init__(
        self, models: Mapping[str, MappedModel], lint: PrefixLint, start_seconds: float = START_SECONDS
    ) -> None:
        self._models = models
        self._lint = lint
        self._start_seconds = start_seconds
        self._waits_until = 0.0
        self.waiting_bytes = 0
        """Of bodies whose prompts are being mapped, or wait to be."""

    def asks_engine(self, asked: FollowedCall) -> bool:
        """Whether an enforced call must ask the engine for its ids, which edits body and answer: for models
        without another way, and not where the client asks for them itself."""
        model = self._models.get(asked.model)
        by_ids = model is not None and model.engine_ids is not None and _tells_ids(asked)
        return by_ids and not asked.wants_token_ids

    async def map(self, call: TrackedCall, uid: str) -> MappedPrompt | Unmapped:
        """The prompt of a call of context `uid`. With the engine's ids: when the answer has come."""
        self._lint.begin(call, uid)
        asked = call.request.asked
        try:
            with self._room_for(asked.size_bytes // asked.num_prompts):
                model = await self._known(call.request.namespace.model)
                if model is None:
                    return Unmapped(NOT_CONFIGURED)
                if model.service is not None and not model.reason:
                    return await model.service.map(uid, asked.prompt())
            if model.engine_ids is None or not (call.asks_ids or asked.wants_token_ids):
                return Unmapped(model.reason)
            if not _tells_ids(asked):
                return Unmapped(NO_IDS)
            facts = await asyncio.shield(call.answered)
            if facts.prompt_token_ids is None:
                return Unmapped(NOT_TOLD)
            return model.engine_ids.map(uid, len(asked.messages), facts.prompt_token_ids)
        except BridgeError as error:
            return Unmapped(str(error))
        except Exception as error:
            log.exception("mapping failed", call=call.request.call_id)
            return Unmapped(f"the mapping failed: {type(error).__name__}")

    @contextmanager
    def _room_for(self, size: int) -> Iterator[None]:
        """Raises `Unmappable` if too much is being mapped already; the largest is mapped when it is alone."""
        if self.waiting_bytes and self.waiting_bytes + size > MAX_WAITING_BYTES:
            raise Unmappable(
                f"prompts of {self.waiting_bytes} bytes wait to be mapped: more would come too late"
            )
        self.waiting_bytes += size
        try:
            yield
        finally:
            self.waiting_bytes -= size

    async def _known(self, name: str) -> MappedModel | None:
        """The model, once it is known how it is mapped: a start takes seconds, and calls come at once.

        Whoever waits here keeps nobody waiting but the books of his own context.
        """
        model = self._models.get(name)
        if model is None or model.pending is None:
            return model
        self._waits_until = self._waits_until or asyncio.get_running_loop().time() + self._start_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._waits_until):
                await model.pending.wait()
        return self._models.get(name)

    def kind(self, model_name: str) -> MappingKind:
        """How a mapped prompt of this model was mapped."""
        model = self._models.get(model_name)
        return MappingKind.ENGINE_IDS if model is not None and model.engine_ids else MappingKind.EXACT

    def observed(self, call: TrackedCall, result: MappedPrompt | Unmapped) -> PromptMapping:
        """What the lifecycle is told."""
        if isinstance(result, Unmapped):
            found = PromptMapping(kind=MappingKind.NONE, reason=result.reason)
            beside = self._lint.beside(call, call.uid, None)
        else:
            kind = self.kind(call.request.namespace.model)
            found = msgspec.structs.replace(result.observed(), kind=kind)
            beside = self._lint.beside(call, call.uid, result)
        return msgspec.structs.replace(found, change=call.change, beside=beside)

    def inherit(self, model_name: str, parent_uid: str, uid: str) -> None:
        """Let a fork's first prompt be mapped on from its parent's last one, and compared with it."""
        self._lint.inherit(parent_uid, uid)
        model = self._models.get(model_name)
        if model is not None and model.service is not None:
            model.service.clone(parent_uid, uid)


def _tells_ids(asked: FollowedCall) -> bool:
    """Whether an answer can carry the ids of this one prompt."""
    return asked.tells_token_ids and asked.num_prompts == 1
