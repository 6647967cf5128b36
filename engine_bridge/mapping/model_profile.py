"""What the mapping knows of one served model: tokenizer, chat template, server defaults, fingerprint."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

# Only tokenizers are used here: no advice to install a framework, in this process or its workers.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.environment import (
    detect_content_format,
    supports_developer,
    template_variables,
    wants_system_first,
)
from engine_bridge.mapping.normalise import ContentFormat
from engine_bridge.mapping.tokens import TextTokenizer

_NO_JINJA = {
    "gpt_oss": "gpt-oss prompts are written by the Harmony encoder, not by a chat template",
    "deepseek_v32": "DeepSeek V3.2 prompts are written by the engine's own encoder",
    "deepseek_v4": "DeepSeek V4 prompts are written by the engine's own encoder",
    "deepseek_v41": "DeepSeek V4 prompts are written by the engine's own encoder",
    "kimi_k3": "Kimi K3 prompts are written by the engine's own encoder",
    "kimi_audio": "Kimi Audio prompts are not text alone",
    "inkling": "Inkling prompts are written by the engine's own encoder",
}
_NO_JINJA_MODES = {
    "mistral": "the mistral tokenizer mode renders with mistral-common, not with a chat template",
    "cohere": "the cohere tokenizer mode renders with the engine's own encoder",
    **_NO_JINJA,
}


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator, or the engine itself, says about how the model is served. Empty versions are
    unknown.
    """

    engine_version: str = ""
    transformers_version: str = ""
    tokenizer_mode: str = "auto"
    chat_template: str | None = None
    content_format: Literal["auto", "string", "openai"] = "auto"
    default_kwargs: dict[str, Any] = {}
    exclude_tools_when_tool_choice_none: bool = False
    tokenizer_json: Path | None = None


class TemplateFacts(msgspec.Struct, frozen=True):
    """One template source with what is read off it once."""

    source: str
    content_format: ContentFormat
    variables: frozenset[str]
    knows_developer: bool


class ModelProfile:
    """A model that can be mapped. `source_for` picks the template as transformers does."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        facts: EngineFacts | None = None,
    ) -> None:
        self.name = name
        self.facts = facts or EngineFacts()
        self.special_tokens = dict(special_tokens or {})
        self.tokenizer = TextTokenizer(tokenizer)
        self._templates = {key: self._read(source) for key, source in templates.items()}
        self.fingerprint = self._fingerprint(tokenizer.to_str())

    @classmethod
    def load(cls, directory: Path, name: str, facts: EngineFacts | None = None) -> "ModelProfile":
        """Load a local model directory the way the engine does.

        Raises `Unmappable` for a model without a Jinja path, with the reason.
        """
        facts = facts or EngineFacts()
        reason = no_jinja_reason(directory, facts.tokenizer_mode)
        if reason:
            raise Unmappable(reason)
        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise Unmappable("the model has no fast tokenizer")
        if facts.tokenizer_json is not None:
            backend = Tokenizer.from_file(str(facts.tokenizer_json))
        templates = facts.chat_template if facts.chat_template is not None else loaded.chat_template
        if not templates:
            raise Unmappable("the model has no chat template")
        return cls(
            name=name,
            tokenizer=backend,
            templates=templates if isinstance(templates, dict) else {"default": templates},
            special_tokens={
                key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)
            },
            facts=facts,
        )

    def template_for(self, with_tools: bool) -> TemplateFacts:
        """Template of a request. Raises `Unmappable` when several are named and none is the default."""
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise Unmappable(f"none of the chat templates {sorted(self._templates)} is the default")
        return self._templates["default"]

    def wants_system_first(self) -> bool:
        """Whether one of the templates that may be picked wants all system messages in front."""
        return any(wants_system_first(self.template_for(tools).source) for tools in (False, True))

    def _read(self, source: str) -> TemplateFacts:
        given = self.facts.content_format
        return TemplateFacts(
            source=source,
            content_format=detect_content_format(source) if given == "auto" else given,
            variables=template_variables(source),
            knows_developer=supports_developer(source),
        )

    def _fingerprint(self, tokenizer_json: str) -> str:
        parts = {
            "engine": self.facts.engine_version,
            "transformers": [self.facts.transformers_version, transformers.__version__],
            "tokenizer": _digest(tokenizer_json),
            "templates": {key: _digest(facts.source) for key, facts in self._templates.items()},
            "formats": {key: facts.content_format for key, facts in self._templates.items()},
            "special_tokens": self.special_tokens,
            "default_kwargs": self.facts.default_kwargs,
            "exclude_tools": self.facts.exclude_tools_when_tool_choice_none,
        }
        return _digest(json.dumps(parts, sort_keys=True))[:32]


def no_jinja_reason(directory: Path, tokenizer_mode: str = "auto") -> str:
    """Why a model's prompts are not made by a chat template; empty if they are."""
    if tokenizer_mode in _NO_JINJA_MODES:
        return _NO_JINJA_MODES[tokenizer_mode]
    config = _config(directory)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _NO_JINJA:
        return _NO_JINJA[kind]
    if (directory / "tekken.json").exists() and tokenizer_mode == "auto":
        return "the engine picks the mistral tokenizer for this model"
    if (directory / "chat_template.json").exists():
        return "the model has a processor template of its own"
    return ""


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.exists():
        return {}
    value = json.loads(path.read_text())
    return value if isinstance(value, dict) else {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
