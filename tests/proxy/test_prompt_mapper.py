"""A prompt's tokens, or the reason why they are not known; nothing is raised."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

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
from proxy.prompt_mapper import MAX_WAITING_BYTES, PromptMapper
from proxy.tracked_call import CallRequest, TrackedCall, Unmapped
from tests.lifecycle.lives import ManualClock
from tests.proxy.conversations import chat, user
from tests.proxy.toy_model import CHUNK, write_model

ENGINE = EngineIdentity("1", ("m",))


def a_call(size_bytes: int = 100, num_prompts: int = 1, **fields: Any) -> TrackedCall:
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
        asked=msgspec.structs.replace(
            chat([user("a message that is long enough for a chunk")], **fields),
            size_bytes=size_bytes,
            num_prompts=num_prompts,
        ),
        fields=LifecycleFields(),
    )
    return TrackedCall(request, lambda c: None, lambda *told: None)


def lint() -> PrefixLint:
    return PrefixLint(Tracker(MemoryEventLog(), ManualClock()))


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    profile = load_profile(ModelConfig(path=str(write_model(tmp_path / "m")), name="m"), ENGINE)
    assert not isinstance(profile, MappedModel)
    return mapped_model(profile, CHUNK, 1)


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


async def test_what_would_be_mapped_too_late_is_not_mapped(model: MappedModel) -> None:
    prepared = asyncio.Event()
    models = {"m": not_reached("m", prepared)}
    mapper = PromptMapper(models, lint())
    sizes = [MAX_WAITING_BYTES // 2, MAX_WAITING_BYTES // 2]
    waiting = [asyncio.ensure_future(mapper.map(a_call(size), f"u{size}")) for size in sizes]
    await asyncio.sleep(0)
    several = a_call(MAX_WAITING_BYTES, num_prompts=2)  # half of it each
    for call in (a_call(1), a_call(MAX_WAITING_BYTES), several):
        told = await mapper.map(call, "late")
        assert isinstance(told, Unmapped)
        assert str(MAX_WAITING_BYTES) in told.reason
    assert mapper.waiting_bytes == MAX_WAITING_BYTES
    models["m"] = model
    prepared.set()
    assert all(isinstance(result, MappedPrompt) for result in await asyncio.gather(*waiting))
    assert mapper.waiting_bytes == 0
    assert isinstance(await mapper.map(a_call(MAX_WAITING_BYTES * 2), "large, and alone"), MappedPrompt)
    assert isinstance(await mapper.map(a_call(1), "late"), MappedPrompt)
    assert model.service is not None
    await model.service.close()


async def test_who_waits_for_the_engines_ids_takes_no_room(model: MappedModel) -> None:
    by_ids = model_by_ids(MappedModel("m", reason="no template"), ENGINE, CHUNK)
    mapper = PromptMapper({"m": by_ids}, lint())
    calls = [a_call(MAX_WAITING_BYTES), a_call(MAX_WAITING_BYTES)]
    for call in calls:
        call.asks_ids = True
    mappings = [asyncio.ensure_future(mapper.map(call, "u")) for call in calls]
    for call in calls:
        call.answered.set_result(AnswerFacts(status=200, prompt_token_ids=tuple(range(40))))
    assert all(isinstance(result, MappedPrompt) for result in await asyncio.gather(*mappings))
