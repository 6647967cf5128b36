"""An engine with our tokens passes; any other is found out, with the probe and the position."""

import pytest

from engine_bridge.errors import RejectedByEngine, TemplateMismatch, Unmappable
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.verify import probes, verify
from tests.engine_bridge.mapping.conversations import CHATML, has_real, real_profile, toy_profile


def engine(source):
    """A stand-in for an engine's /tokenize that serves this template."""
    mapper = ChatMapper(toy_profile(source))

    async def tokenize(body):
        return mapper.map(ChatPrompt.from_body(body)).token_ids.tolist()

    return tokenize


async def test_equal_tokens_verify_every_probe():
    mapper = ChatMapper(toy_profile(CHATML))
    got = await verify(mapper, engine(CHATML))
    assert got.fingerprint == mapper.profile.fingerprint
    assert got.compared == tuple(probe.name for probe in probes())
    assert got.refused == ()


async def test_another_template_is_found_out():
    with pytest.raises(TemplateMismatch) as caught:
        await verify(ChatMapper(toy_profile(CHATML)), engine(CHATML.replace("<|im_end|>", "<|im_end|> ")))
    assert caught.value.probe == "user"
    assert caught.value.position > 0


async def test_a_probe_that_both_refuse_counts_as_agreement():
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    got = await verify(ChatMapper(toy_profile(strict)), engine(strict))
    assert "system" in got.refused
    assert "user" in got.compared


async def test_a_refusal_of_one_side_only_is_a_mismatch():
    async def refuse(body):
        raise RejectedByEngine("no")

    with pytest.raises(TemplateMismatch):
        await verify(ChatMapper(toy_profile(CHATML)), refuse)


async def test_a_probe_that_we_do_not_map_proves_nothing():
    class Narrow(ChatMapper):
        def map(self, prompt, state=None):
            if prompt.tools:
                raise Unmappable("no tools here")
            return super().map(prompt, state)

    got = await verify(Narrow(toy_profile(CHATML)), engine(CHATML))
    assert got.unmapped == ("tools",)
    assert "calls without tools" in got.compared


def test_probes_tell_thinking_from_not_thinking_on_a_real_model():
    if not has_real("qwen3"):
        pytest.fail("run tests/fetch_tokenizers.py qwen3 first: make test does")
    mapper = ChatMapper(real_profile("qwen3"))
    ids = {probe.name: mapper.map(ChatPrompt.from_body(probe.body)).token_ids.tolist() for probe in probes()}
    assert len({tuple(found) for found in ids.values()}) == len(ids)
