"""A model directory is read the way the engine reads it, or it says why not."""

import json

import pytest

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.model_profile import EngineFacts, ModelProfile, no_jinja_reason
from engine_bridge.mapping.prompts import ChatPrompt
from tests.engine_bridge.mapping.conversations import (
    CHATML,
    TOOLS,
    has_real,
    real_profile,
    toy_profile,
    toy_tokenizer,
)

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def directory(tmp_path):
    toy_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def test_a_directory_maps_like_its_parts(directory):
    loaded = ChatMapper(ModelProfile.load(directory, "toy"))
    made = ChatMapper(toy_profile(CHATML))
    prompt = ChatPrompt(messages=[USER, {"role": "assistant", "content": "</s> yes"}, USER])
    assert loaded.map(prompt).token_ids == made.map(prompt).token_ids


def test_the_operators_template_and_tokenizer_win(directory, tmp_path):
    facts = EngineFacts(
        chat_template="{{ messages[0].content }}", tokenizer_json=directory / "tokenizer.json"
    )
    mapper = ChatMapper(ModelProfile.load(directory, "toy", facts))
    ids = mapper.map(ChatPrompt(messages=[USER])).token_ids
    assert mapper.profile.tokenizer.backend.decode(ids.tolist()) == "hi"


def test_the_tool_template_serves_requests_with_tools():
    templates = {"default": "d{{ messages[0].content }}", "tool_use": "t{{ messages[0].content }}"}
    profile = ModelProfile(name="toy", tokenizer=toy_tokenizer(), templates=templates)
    assert profile.template_for(False).source.startswith("d")
    assert profile.template_for(True).source.startswith("t")
    with pytest.raises(Unmappable):
        ModelProfile(name="toy", tokenizer=toy_tokenizer(), templates={"rag": "x"}).template_for(False)


def test_no_template_is_a_reason(directory):
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(Unmappable, match="no chat template"):
        ModelProfile.load(directory, "toy")


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v32", "kimi_k3"])
def test_models_with_an_encoder_of_their_own_are_named(directory, kind):
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    assert no_jinja_reason(directory)
    with pytest.raises(Unmappable):
        ModelProfile.load(directory, "toy")


def test_the_mistral_mode_has_no_jinja_path(directory):
    assert "mistral" in no_jinja_reason(directory, "mistral")
    (directory / "tekken.json").write_text("{}")
    assert "mistral" in no_jinja_reason(directory)
    assert not no_jinja_reason(directory, "hf")


def test_the_fingerprint_moves_with_everything_that_changes_a_prompt():
    variants = [
        toy_profile(CHATML),
        toy_profile(CHATML + " "),
        *(
            toy_profile(CHATML, facts)
            for facts in (
                EngineFacts(engine_version="0.32.0"),
                EngineFacts(transformers_version="5.19.0"),
                EngineFacts(content_format="openai"),
                EngineFacts(default_kwargs={"enable_thinking": False}),
            )
        ),
    ]
    assert len({profile.fingerprint for profile in variants}) == len(variants)
    assert toy_profile(CHATML).fingerprint == variants[0].fingerprint


def test_the_servers_default_kwargs_reach_the_template():
    source = "{{ style }}{{ messages[0].content }}"
    mapper = ChatMapper(toy_profile(source, EngineFacts(default_kwargs={"style": "dry"})))
    decode = mapper.profile.tokenizer.backend.decode
    assert decode(mapper.map(ChatPrompt(messages=[USER])).token_ids.tolist()) == "dryhi"
    asked = ChatPrompt(messages=[USER], chat_template_kwargs={"style": "wet"})
    assert decode(mapper.map(asked).token_ids.tolist()) == "wethi"


def test_tools_can_be_left_out_when_none_may_be_called():
    facts = EngineFacts(exclude_tools_when_tool_choice_none=True)
    mapper = ChatMapper(toy_profile("{{ tools | tojson }}" + CHATML, facts))
    without = mapper.map(ChatPrompt(messages=[USER], tools=TOOLS, tool_choice="none"))
    assert without.tools_end == 0
    assert mapper.map(ChatPrompt(messages=[USER], tools=TOOLS)).tools_end > 0


def test_a_real_model_loads():
    if not has_real("qwen3"):
        pytest.fail("run tests/fetch_tokenizers.py qwen3 first: make test does")
    assert real_profile("qwen3").template_for(True).content_format == "string"
