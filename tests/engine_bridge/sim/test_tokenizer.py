"""The engine's own way from messages to tokens equals a plain encoding, and its words read back."""

import random
from pathlib import Path

import pytest

from engine_bridge.errors import RejectedByEngine
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.sim.model_files import MODEL_DIRECTORY
from engine_bridge.sim.tokenizer import ChatTokenizer
from tests.engine_bridge.mapping.conversations import NPM, TOOLS, Walk, has_real, plain_text

OURS = ChatTokenizer(MODEL_DIRECTORY)
DIRECTORIES = [MODEL_DIRECTORY, *(NPM / n / "models" for n in ("qwen3",) if has_real(n))]


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.parent.name)
def test_pieces_make_the_encoding_of_the_whole(directory: Path):
    tokenizer, conversation = ChatTokenizer(directory), Walk(3)
    mapper = ChatMapper(tokenizer.profile)
    for _ in range(20):
        prompt = conversation.prompt()
        try:
            text = plain_text(mapper, prompt)
        except Exception:  # noqa: BLE001 - a template refuses what it likes
            with pytest.raises(RejectedByEngine):
                tokenizer.prompt_text(prompt)
        else:
            assert tokenizer.prompt_text(prompt) == text
            assert tokenizer.encode(text) == tokenizer.profile.tokenizer.encode(text)
        conversation.step()


def test_any_sequence_of_its_words_reads_back():
    assert len(OURS.words) > 500
    said = random.Random(1).choices(OURS.words, k=200)
    assert OURS.encode(OURS.decode(said)).tolist() == said


@pytest.mark.parametrize("directory", DIRECTORIES[:2], ids=lambda path: path.parent.name)
def test_a_reply_sent_back_continues_what_was_generated(directory: Path):
    tokenizer = ChatTokenizer(directory)
    prompt = ChatPrompt(
        messages=[{"role": "user", "content": "Run it."}],
        tools=TOOLS,
        chat_template_kwargs={"enable_thinking": False},
    )
    call = {"name": "run", "arguments": '{"a": "été"}'}
    message = {
        "role": "assistant",
        "content": "Yes.",
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }
    asked = tokenizer.prompt_ids(prompt)
    said = tokenizer.reply_ids(prompt, message)
    assert "Yes." in tokenizer.decode(said)
    assert '"run"' in tokenizer.decode(said)
    if directory == MODEL_DIRECTORY:
        later = tokenizer.prompt_ids(ChatPrompt(messages=[*prompt.messages, message], tools=TOOLS))
        assert later[: len(asked) + len(said)] == asked + said
        assert later[len(asked) + len(said)] in tokenizer.eos_ids


def test_the_context_and_the_end_are_the_models_own():
    assert OURS.context_tokens == 262144
    assert [OURS.decode([each], skip_special=False) for each in OURS.eos_ids] == ["<|done|>"]
