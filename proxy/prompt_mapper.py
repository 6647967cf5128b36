"""A call's prompt in tokens: by template and tokenizer, by the engine's ids, or the reason why not."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import structlog

from engine_bridge.errors import BridgeError
from engine_bridge.mapping.ranges import MappedPrompt
from lifecycle.core.observations import PromptMapping
from lifecycle.vocabulary import MappingKind
from proxy.followed_call import FollowedCall
from proxy.models import MappedModel
from proxy.prefix_lint import PrefixLint
from proxy.tracked_call import CallRequest, TrackedCall, Unmapped

log = structlog.get_logger(__name__)

NOT_CONFIGURED = "the model is not configured"
START_SECONDS = 20.0
"""How long after a start, from the first call on, calls wait to be mapped; the body has left long before."""

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

    def asks_engine(self, asked: FollowedCall) -> bool:
        """Whether an enforced call must ask the engine for its ids, which edits body and answer: for models
        without another way, and not where the client asks for them itself."""
        model = self._models.get(asked.model)
        by_ids = model is not None and model.engine_ids is not None and _tells_ids(asked)
        return by_ids and not asked.wants_token_ids

    async def map(self, call: TrackedCall, uid: str) -> MappedPrompt | Unmapped:
        """The prompt of a call of context `uid`. With the engine's ids: when the answer has come."""
        self._lint.begin(call, uid)
        model = await self._known(call.request.namespace.model)
        asked = call.request.asked
        try:
            if model is None:
                return Unmapped(NOT_CONFIGURED)
            if model.service is not None and not model.reason:
                size = asked.size_bytes // asked.num_prompts
                return await model.service.map(uid, asked.prompt(), size)
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

    def forget(self, request: CallRequest) -> None:
        """Drop what is held for the context that a call would have opened: another call opened it."""
        self._lint.forget(request.uid)
        model = self._models.get(request.namespace.model)
        if model is not None and model.service is not None:
            model.service.forget(request.uid)

    def inherit(self, model_name: str, parent_uid: str, uid: str) -> None:
        """Let a fork's first prompt be mapped on from its parent's last one, and compared with it."""
        self._lint.inherit(parent_uid, uid)
        model = self._models.get(model_name)
        if model is not None and model.service is not None:
            model.service.clone(parent_uid, uid)


def _tells_ids(asked: FollowedCall) -> bool:
    """Whether an answer can carry the ids of this one prompt."""
    return asked.tells_token_ids and asked.num_prompts == 1
