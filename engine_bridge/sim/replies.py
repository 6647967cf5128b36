"""What the simulated model says: a script's words where there is a script, else pseudo-text.

Both depend on the conversation alone: the same list gets the same reply, whoever asks and whenever.
"""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from blake3 import blake3

MIN_WORDS, MAX_WORDS = 16, 96
"""Length of pseudo-text in tokens where nobody asks for another."""

_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class InvalidScript(ValueError):
    """The script cannot be used; the message says where and why."""


class ToolUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the model calls."""

    name: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model says. `text` None is pseudo-text of `num_tokens` tokens, 0 of some length, or nothing
    beside tool calls. `finish_reason` empty follows from the rest.
    """

    text: str | None = None
    tool_calls: tuple[ToolUse, ...] = ()
    num_tokens: int = 0
    finish_reason: Literal["", "stop", "length", "tool_calls"] = ""


class Asked(msgspec.Struct, frozen=True):
    """What the model is asked: the parsed request body, with its messages and tools."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    body: dict[str, Any]

    @property
    def last_text(self) -> str:
        """Text of the last message."""
        return text_of(self.messages[-1]) if self.messages else ""

    @property
    def num_tool_turns(self) -> int:
        """How many of the messages called tools."""
        return sum(bool(message.get("tool_calls")) for message in self.messages)


Script = Callable[[Asked], Reply | None]
"""The reply to a conversation; None leaves it to pseudo-text."""


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold of a conversation; everything that is given."""

    role: str | None = None
    contains: str | None = None
    tool: str | None = None
    tool_turns: int | None = None

    def holds(self, asked: Asked) -> bool:
        names = {tool.get("function", {}).get("name") for tool in asked.tools}
        return (
            (self.role is None or (bool(asked.messages) and asked.messages[-1].get("role") == self.role))
            and (self.contains is None or self.contains in asked.last_text)
            and (self.tool is None or self.tool in names)
            and (self.tool_turns is None or asked.num_tool_turns == self.tool_turns)
        )


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a script file."""

    reply: Reply
    when: When = When()


def script_from_rules(rules: Sequence[Rule]) -> Script:
    """The first rule that holds answers."""

    def script(asked: Asked) -> Reply | None:
        return next((rule.reply for rule in rules if rule.when.holds(asked)), None)

    return script


def load_script(path: Path) -> Script:
    """A script file, YAML or JSON: a list of `{when: …, reply: …}`. Raises `InvalidScript`."""
    try:
        return script_from_rules(msgspec.convert(yaml.safe_load(path.read_text()), list[Rule]))
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise InvalidScript(f"{path}: {error}") from error


def text_of(message: dict[str, Any]) -> str:
    """A message's content as text, parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def chosen_text(body: dict[str, Any]) -> str | None:
    """The one thing that a request allows the model to say, if it allows one thing only."""
    outputs = body.get("structured_outputs")
    choices = outputs.get("choice") if isinstance(outputs, dict) else None
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], str):
        return choices[0]
    return None


def hermes_calls(text: str) -> tuple[str, tuple[ToolUse, ...]]:
    """Tool calls in the form `<tool_call>{…}</tool_call>`, and the text beside them."""
    calls = []
    for found in _HERMES.finditer(text):
        try:
            calls.append(msgspec.convert(json.loads(found.group(1)), ToolUse))
        except (ValueError, msgspec.ValidationError):
            return text, ()
    return _HERMES.sub("", text).strip(), tuple(calls)


def pseudo_random(prompt: array[int], choice: int, seed: object = None) -> random.Random:
    """Chance that is the same for the same prompt, choice and seed."""
    digest = blake3(prompt.tobytes() + f"{choice} {seed}".encode()).digest()
    return random.Random(digest)


def pseudo_length(chance: random.Random, limit: int, minimum: int = 0) -> int:
    """Tokens of a reply of no special length, `[minimum, limit]`."""
    return min(max(chance.randint(MIN_WORDS, MAX_WORDS), minimum), limit)


def pseudo_ids(chance: random.Random, words: Sequence[int], count: int) -> list[int]:
    """So many words, each one token."""
    return chance.choices(words, k=count)
