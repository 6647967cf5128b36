"""Chat requests to tokens and back, by any local model directory.

The prompt is rendered as a whole each time and cut at the tokenizer's added tokens; only the encodings of the
pieces are remembered. So it does not share the proxy's own resumable way, which it is meant to be held
against, and yet a long conversation costs little.
"""

from __future__ import annotations

import functools
import json
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from tokenizers import AddedToken

from engine_bridge.errors import RejectedByEngine
from engine_bridge.mapping.environment import ChatEnvironment
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.model_profile import ModelProfile
from engine_bridge.mapping.prompts import ChatPrompt

PIECES = 16_384
"""Remembered encodings; a piece is what stands between two added tokens, about one message."""

DEFAULT_CONTEXT = 131_072
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_WORD = re.compile(r" [a-z]{3,12}")


class ChatTokenizer:
    """Template and tokenizer of a model directory. Raises what `ModelProfile.load` raises, and
    `FileNotFoundError`.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            # To the loader it would be a name on a model hub.
            raise FileNotFoundError(f"there is no model directory {directory}")
        self.profile = ModelProfile.load(directory, str(directory))
        self._mapper = ChatMapper(self.profile)
        self._environment = ChatEnvironment()
        self._backend = self.profile.tokenizer.backend
        config = _read_json(directory / "config.json")
        self.context_tokens = int(config.get("max_position_embeddings") or DEFAULT_CONTEXT)
        self.eos_ids = frozenset(_eos_ids(directory, config)) or frozenset(
            number
            for content in [self.profile.special_tokens.get("eos_token")]
            if content is not None and (number := self._backend.token_to_id(content)) is not None
        )
        added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        self._marks = _marks(list(added.values()), self._backend.normalizer is not None)
        self._piece = functools.lru_cache(PIECES)(self._encode)

    def prompt_ids(self, prompt: ChatPrompt) -> array[int]:
        """Tokens of a chat request. Raises `RejectedByEngine`, `Unmappable`."""
        return self.encode(self.prompt_text(prompt))

    def prompt_text(self, prompt: ChatPrompt) -> str:
        """A chat request as the template writes it. Raises `RejectedByEngine`, `Unmappable`."""
        prepared = self._mapper.prepare(prompt, MappingState())
        given = prepared.given
        try:
            text = self._template(prepared.facts.source).render(
                **given.kwargs, messages=given.conversation, tools=given.tools
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RejectedByEngine(str(error)) from error
        if given.open_ended:
            at = text.rindex(_CONTINUED.strip())
            text = text[:at] if text[at : at + len(_CONTINUED)] == _CONTINUED else text[:at].rstrip()
        return text

    def reply_ids(self, prompt: ChatPrompt, message: dict[str, Any]) -> array[int]:
        """What a model would generate to say an assistant's message, as the template writes it back.

        Where a template writes the past otherwise than it asks for the next turn, it is the message's text
        and its calls as JSON.
        """
        before = self.prompt_text(prompt)
        grown = msgspec.structs.replace(
            prompt, messages=[*prompt.messages, message], add_generation_prompt=False
        )
        after = self.prompt_text(grown)
        if prompt.add_generation_prompt and after.startswith(before):
            ids = self.encode(after[len(before) :])
            ends = [at for at, number in enumerate(ids) if number in self.eos_ids]
            return ids[: ends[-1]] if ends else ids
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        return self.encode("\n".join([message.get("content") or "", *calls]))

    def encode(self, text: str) -> array[int]:
        """Token ids, no special tokens added. Raises `RejectedByEngine` for lone surrogates."""
        if self._marks is None:
            return self._encode(text)
        ids = array("I")
        starts = [match.start() for match in self._marks.finditer(text)]
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            if start < end:
                ids += self._piece(text[start:end])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def names(self, ids: Sequence[int]) -> list[str | None]:
        """How the vocabulary writes tokens."""
        return [self._backend.id_to_token(each) for each in ids]

    @functools.cached_property
    def words(self) -> tuple[int, ...]:
        """Tokens that are a blank and a whole word each: any sequence of them reads back as itself."""
        found = []
        for number in range(self._backend.get_vocab_size()):
            text = self._backend.decode([number])
            if _WORD.fullmatch(text) and self._encode(text).tolist() == [number]:
                found.append(number)
        return tuple(found)

    def _encode(self, text: str) -> array[int]:
        return self.profile.tokenizer.encode(text)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as the model
    def _template(self, source: str) -> jinja2.Template:
        return self._environment.from_string(source)


def _marks(added: Sequence[AddedToken], normalises: bool) -> re.Pattern[str] | None:
    """What to cut a text at; None where an added token looks at what stands before it."""
    if not added or any(t.lstrip or t.single_word or (t.normalized and normalises) for t in added):
        return None
    contents = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents)))


def _eos_ids(directory: Path, config: dict[str, Any]) -> list[int]:
    generation = _read_json(directory / "generation_config.json")
    told = generation.get("eos_token_id", config.get("eos_token_id"))
    return [told] if isinstance(told, int) else list(told or ())


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text()) if path.exists() else {}
    return value if isinstance(value, dict) else {}
