"""Which models are mapped: name and version from the engine, the rest from disk, and why not."""

import json
from pathlib import Path

import pytest

from engine_bridge.engine_address import EngineAddress
from engine_bridge.errors import RejectedByEngine
from engine_bridge.mapping.backlog import MappingBacklog
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.model_profile import ModelProfile
from engine_bridge.mapping.prompts import ChatPrompt
from proxy.config import ModelConfig
from proxy.models import (
    EngineIdentity,
    EngineUnreached,
    MappedModel,
    ask_engine,
    load_profile,
    map_models,
    mapped_model,
    plain_ids,
    template_problem,
    warm_up,
)
from tests.proxy.scripted_upstream import Exchange, Script, ScriptedUpstream
from tests.proxy.toy_model import CHUNK, NAME, TEMPLATE, write_model

ENGINE = EngineIdentity("1.2", (NAME, "second"))


async def engine(exchange: Exchange) -> None:
    await exchange.read_body()
    assert exchange.header(b"authorization") == [b"Bearer k"]
    if exchange.target == b"/version":
        await exchange.respond_json({"version": "1.2"})
    else:
        adapter = {"id": "lora", "parent": NAME}
        await exchange.respond_json({"data": [{"id": NAME}, adapter, {"id": "second"}]})


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_engine_tells_its_version_and_its_models(suffix: str) -> None:
    async with ScriptedUpstream(engine) as up:
        assert await ask_engine(EngineAddress(up.url + suffix, key="k")) == ENGINE


@pytest.mark.parametrize("body", [b"no json", b"[]", b"{}", b'{"data": [{}]}', b'{"data": 1}'])
async def test_what_no_engine_says_is_no_engine(body: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, body)

    async with ScriptedUpstream(script) as up:
        with pytest.raises(EngineUnreached):
            await ask_engine(EngineAddress(up.url))
        url = up.url
    with pytest.raises(EngineUnreached):
        await ask_engine(EngineAddress(url))


def test_a_model_is_known_by_its_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    profile = load_profile(ModelConfig(path=str(path)), ENGINE)
    assert not isinstance(profile, MappedModel)
    assert profile.name == NAME
    assert len(plain_ids(profile, "four")) == 4
    other = load_profile(ModelConfig(path=str(write_model(tmp_path / "n", "{{ messages }}"))), ENGINE)
    assert not isinstance(other, MappedModel)
    assert other.fingerprint != profile.fingerprint
    newer = load_profile(ModelConfig(path=str(path)), EngineIdentity("1.3", (NAME,)))
    assert not isinstance(newer, MappedModel)
    assert newer.fingerprint != profile.fingerprint


def test_why_a_model_is_not_mapped(tmp_path: Path) -> None:
    nothing = load_profile(ModelConfig(path=str(tmp_path / "nowhere"), name="x"), ENGINE)
    assert isinstance(nothing, MappedModel)
    assert (nothing.name, nothing.service) == ("x", None)
    assert nothing.reason
    path = write_model(tmp_path / "m", "")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    untold = load_profile(ModelConfig(path=str(path)), ENGINE)
    assert isinstance(untold, MappedModel)
    assert "template" in untold.reason


async def test_a_mapped_model_maps(tmp_path: Path) -> None:
    profile = load_profile(ModelConfig(path=str(write_model(tmp_path / "m"))), ENGINE)
    assert not isinstance(profile, MappedModel)
    model = mapped_model(profile, CHUNK, 1, MappingBacklog())
    assert model.service is not None
    try:
        await warm_up(model)
        assert model.service.size_bytes == 0
        mapped = await model.service.map("a", ChatPrompt(messages=[{"role": "user", "content": "hi"}]))
        assert mapped.chunk_tokens == CHUNK
        assert mapped.num_tokens == len(mapped.token_ids)
    finally:
        await model.service.close()


def profile_of(folder: Path, template: str = TEMPLATE) -> ModelProfile:
    profile = load_profile(ModelConfig(path=str(write_model(folder, template))), ENGINE)
    assert isinstance(profile, ModelProfile)
    return profile


def tokenizing(profile: ModelProfile) -> Script:
    """An engine that renders with this profile."""

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        assert exchange.target == b"/tokenize"
        assert exchange.header(b"authorization") == [b"Bearer k"]
        try:
            mapped = ChatMapper(profile).map(ChatPrompt.from_body(exchange.json()))
        except RejectedByEngine as error:
            await exchange.respond_json({"object": "error", "message": str(error)}, 400)
        else:
            await exchange.respond_json({"tokens": mapped.token_ids.tolist()})

    return script


async def test_an_engine_with_our_template_is_told_from_any_other(tmp_path: Path) -> None:
    ours = profile_of(tmp_path / "ours")
    theirs = profile_of(tmp_path / "theirs", TEMPLATE.replace("}}<|im_end|>", "}} <|im_end|>"))
    async with ScriptedUpstream(tokenizing(ours)) as up:
        assert await template_problem(ours, EngineAddress(up.url + "/v1", key="k")) == ""
        problem = await template_problem(theirs, EngineAddress(up.url, key="k"))
        assert "probe 'user': ids differ" in problem
        assert "set models[].path" in problem


@pytest.mark.parametrize("status", [404, 405, 501, 200])
async def test_an_engine_that_tells_no_tokens_proves_nothing(tmp_path: Path, status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond_json({"detail": "?"}, status)

    async with ScriptedUpstream(script) as up:
        assert await template_problem(profile_of(tmp_path), EngineAddress(up.url)) == ""


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_that_fails_is_asked_again(tmp_path: Path, status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(status, b"busy")

    async with ScriptedUpstream(script) as up:
        with pytest.raises(EngineUnreached):
            await template_problem(profile_of(tmp_path), EngineAddress(up.url))


async def test_what_was_wrong_may_be_right_the_next_time(tmp_path: Path) -> None:
    ours = profile_of(tmp_path / "ours")
    theirs = profile_of(tmp_path / "theirs", TEMPLATE.replace("assistant", "model"))
    models = {NAME: MappedModel(NAME, reason="not reached"), "odd": MappedModel("odd", reason="no template")}
    async with ScriptedUpstream(tokenizing(theirs)) as up:
        served = {EngineAddress(up.url, key="k"): (NAME,)}
        await map_models(models, {NAME: ours}, ENGINE, CHUNK, 1, MappingBacklog(), served)
        service = models[NAME].service
        assert service is not None
        try:
            assert "ids differ" in models[NAME].reason
            assert models["odd"].engine_ids is not None
            up.script = tokenizing(ours)
            await map_models(models, {NAME: ours}, ENGINE, CHUNK, 1, MappingBacklog(), served)
            assert models[NAME] == MappedModel(NAME, service, ours.fingerprint)
        finally:
            await service.close()


async def test_every_engine_that_serves_a_model_must_render_it_as_we_do(tmp_path: Path) -> None:
    ours = profile_of(tmp_path / "ours")
    theirs = profile_of(tmp_path / "theirs", TEMPLATE.replace("assistant", "model"))
    models = {NAME: MappedModel(NAME)}
    async with ScriptedUpstream(tokenizing(ours)) as good, ScriptedUpstream(tokenizing(theirs)) as bad:
        here, there = EngineAddress(good.url, "here", "k"), EngineAddress(bad.url, "there", "k")
        try:
            backlog, both, one = (
                MappingBacklog(),
                {here: (NAME,), there: (NAME,)},
                {here: (NAME,), there: ("x",)},
            )
            await map_models(models, {NAME: ours}, ENGINE, CHUNK, 1, backlog, both)
            assert models[NAME].reason.startswith("engine there: ")
            await map_models(models, {NAME: ours}, ENGINE, CHUNK, 1, backlog, one)
            assert models[NAME].reason == ""
        finally:
            service = models[NAME].service
            assert service is not None
            await service.close()
