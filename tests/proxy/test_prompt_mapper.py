"""A prompt's tokens, or the reason why they are not known; nothing is raised."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.mapping.backlog import MappingBacklog
from engine_bridge.mapping.ranges import MappedPrompt
from lifecycle.core.ids import Namespace
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Arm, IdentityRung, MappingKind, Mode
from proxy.answer_facts import AnswerFacts
from proxy.config import ModelConfig
from proxy.identity import Identity
from proxy.lifecycle_fields import LifecycleFields
from proxy.models import EngineIdentity, MappedModel, load_profile, mapped_model, model_by_ids, not_reached
from proxy.prefix_lint import PrefixLint
from proxy.prompt_mapper import PromptMapper
from proxy.tracked_call import CallRequest, TrackedCall, Unmapped
from tests.lifecycle.lives import ManualClock
from tests.proxy.conversations import chat, user
from tests.proxy.toy_model import CHUNK, write_model

ENGINE = EngineIdentity("1", ("m",))


def a_call(**fields: Any) -> TrackedCall:
    request = CallRequest(
        tenant="t",
        mode=Mode.ENFORCE,
        arm=Arm.ENFORCE,
        harness="",
        namespace=Namespace("m"),
        identity=Identity(rung=IdentityRung.EXPLICIT, reason="header", context_id="c"),
        uid="u",
        call_id="c",
        awaits_plan=False,
        asked=chat([user("a message that is long enough for a chunk")], **fields),
        fields=LifecycleFields(),
    )
    return TrackedCall(request, lambda c: None, lambda *told: None)


def lint() -> PrefixLint:
    return PrefixLint(Tracker(MemoryEventLog(), ManualClock()))


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    profile = load_profile(ModelConfig(path=str(write_model(tmp_path / "m")), name="m"), ENGINE)
    assert not isinstance(profile, MappedModel)
    return mapped_model(profile, CHUNK, 1, MappingBacklog())


async def test_by_template_and_tokenizer(model: MappedModel) -> None:
    mapper = PromptMapper({"m": model}, lint())
    call = a_call()
    result = await mapper.map(call, "u")
    assert isinstance(result, MappedPrompt)
    observed = mapper.observed(call, result)
    assert (observed.kind, observed.chunk_size) == (MappingKind.EXACT, CHUNK)
    assert len(observed.message_ends) == 1
    assert len(observed.chunk_keys) == observed.num_tokens // CHUNK * 32
    assert not mapper.asks_engine(call.request.asked)
    assert model.service is not None
    await model.service.close()


async def test_by_the_engines_ids(model: MappedModel) -> None:
    by_ids = model_by_ids(MappedModel("m", reason="no template"), ENGINE, CHUNK)
    mapper = PromptMapper({"m": by_ids}, lint())
    call = a_call()
    assert mapper.asks_engine(call.request.asked)
    call.asks_ids = True
    call.answered.set_result(AnswerFacts(status=200, prompt_token_ids=tuple(range(40))))
    result = await mapper.map(call, "u")
    assert isinstance(result, MappedPrompt)
    observed = mapper.observed(call, result)
    assert (observed.kind, observed.num_tokens) == (MappingKind.ENGINE_IDS, 40)
    untold = a_call()
    untold.asks_ids = True
    untold.answered.set_result(AnswerFacts(status=500))
    assert isinstance(await mapper.map(untold, "u"), Unmapped)


@pytest.mark.parametrize("broken", ["nobody", "no service", "a bug"])
async def test_what_is_not_known_has_a_reason(model: MappedModel, broken: str) -> None:
    models: dict[str, MappedModel] = {}
    if broken == "no service":
        models["m"] = MappedModel("m", reason="no template here")
    elif broken == "a bug":
        models["m"] = MappedModel("m", service=object())  # type: ignore[arg-type]
    mapper = PromptMapper(models, lint())
    call = a_call()
    result = await mapper.map(call, "u")
    assert isinstance(result, Unmapped)
    assert result.reason
    observed = mapper.observed(call, result)
    assert (observed.kind, observed.reason) == (MappingKind.NONE, result.reason)
    mapper.inherit("m" if broken != "a bug" else "other", "a", "b")


async def test_right_after_a_start_a_call_waits_until_the_model_is_known(model: MappedModel) -> None:
    prepared = asyncio.Event()
    models = {"m": not_reached("m", prepared)}
    waits, impatient = PromptMapper(models, lint()), PromptMapper(models, lint(), start_seconds=0.0)
    mapping = asyncio.ensure_future(waits.map(a_call(), "u"))
    told = await impatient.map(a_call(), "u")
    assert isinstance(told, Unmapped)
    assert "not been reached" in told.reason
    assert not mapping.done()
    models["m"] = model
    prepared.set()
    assert isinstance(await mapping, MappedPrompt)
    assert model.service is not None
    await model.service.close()
