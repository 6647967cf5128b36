"""Which models are mapped: name and version from the engine, the rest from disk, and why not."""

import json
from pathlib import Path

import pytest

from engine_bridge.mapping.prompts import ChatPrompt
from proxy.config import ModelConfig
from proxy.models import (
    EngineIdentity,
    EngineUnreached,
    MappedModel,
    ask_engine,
    load_profile,
    mapped_model,
    plain_ids,
    warm_up,
)
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream
from tests.proxy.toy_model import CHUNK, NAME, write_model

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
        assert await ask_engine(up.url + suffix, "Bearer k") == ENGINE


@pytest.mark.parametrize("body", [b"no json", b"[]", b"{}", b'{"data": [{}]}', b'{"data": 1}'])
async def test_what_no_engine_says_is_no_engine(body: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, body)

    async with ScriptedUpstream(script) as up:
        with pytest.raises(EngineUnreached):
            await ask_engine(up.url)
        url = up.url
    with pytest.raises(EngineUnreached):
        await ask_engine(url)


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
    model = mapped_model(profile, CHUNK, 1)
    assert model.service is not None
    try:
        await warm_up(model)
        assert model.service.size_bytes == 0
        mapped = await model.service.map("a", ChatPrompt(messages=[{"role": "user", "content": "hi"}]))
        assert mapped.chunk_tokens == CHUNK
        assert mapped.num_tokens == len(mapped.token_ids)
    finally:
        await model.service.close()
