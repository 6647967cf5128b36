"""Where the configuration comes from, and what is wrong with it: every problem by file and line, or variable.

The file is YAML; environment variables stand above it, flags above both.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import yaml

from proxy.config import (
    ADMIN_KEY_VARIABLE,
    ENVIRONMENT_PREFIX,
    Config,
    InvalidConfig,
    check,
    json_schema,
)
from proxy.upstream import UpstreamTarget

MAX_PROBLEMS = 50

Place: TypeAlias = tuple[str | int, ...]
"""Names and list indices, from the top."""

_AT = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_QUOTED = re.compile(r"`([^`]*)`")
_LOG_SCHEMES = ("sqlite:///", "redis://", "rediss://", "memory:")
_ROWS_SCHEMES = ("sqlite:///", "postgresql://")


class Problem(msgspec.Struct, frozen=True):
    """`where` is a file and line, an environment variable or a flag, `field` the setting, `text` what is
    wrong with it and what would be right."""

    where: str
    field: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.field, self.text) if part)


class ConfigSource(msgspec.Struct, frozen=True):
    """A configuration that can be read again: `file` may change, `load` reads it with all that stands above
    it and raises `InvalidConfig`."""

    load: Callable[[], Config]
    file: Path | None = None


def load_config(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Read and check. `overrides` are dotted names to values. Raises `InvalidConfig` with every problem."""
    config, problems = read_config(path, overrides, environment)
    if config is None:
        raise InvalidConfig("\n".join(map(str, problems)))
    return config


def read_config(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Config | None, list[Problem]]:
    """The configuration, or what is wrong with it."""
    environment = os.environ if environment is None else environment
    reading = _Reading(str(path) if path is not None else "")
    if path is not None:
        reading.take_file(path)
    reading.take_environment(environment)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            reading.set(dotted.split("."), value, f"--{dotted.replace('.', '-').replace('_', '-')}")
    config = reading.convert()
    if config is not None and not reading.problems:
        reading.check(config)
    return (None if reading.problems else config), reading.problems


def told_warnings(config: Config, environment: Mapping[str, str]) -> list[str]:
    """What is allowed and yet looks wrong on this machine."""
    found = [
        f"models: {model.path} is no directory here, so nothing is mapped"
        for model in config.models
        if not Path(model.path).is_dir()
    ]
    for backend in config.backends:
        variable = backend.api_key_env
        if variable and not environment.get(variable):
            engine = f"engine {backend.name}" if backend.name else "the engine"
            found.append(f"upstream.api_key_env: {variable} is not set, so {engine} gets no key")
    return found


class _Reading:
    """One configuration on its way in, and where each part of it came from."""

    def __init__(self, file: str) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._raw: dict[str, Any] = {}
        self._lines: dict[Place, int] = {}
        self._origins: dict[Place, str] = {}

    def take_file(self, path: Path) -> None:
        try:
            text = path.read_text()
            tree = yaml.compose(text, Loader=yaml.SafeLoader)
            loaded = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            self.problems.append(Problem(f"{path}{line}", "", f"no YAML: {error.problem or error}"))
            return
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.problems.append(Problem(str(path), "", reason or str(error)))
            return
        if loaded is not None and not isinstance(loaded, dict):
            self.problems.append(Problem(str(path), "", "a mapping is expected at the top"))
            return
        self._raw = loaded or {}
        if tree is not None:
            self._note_lines(tree, ())

    def take_environment(self, environment: Mapping[str, str]) -> None:
        secrets = {ADMIN_KEY_VARIABLE, *_secret_variables(self._raw)}
        for name, value in environment.items():
            if not name.startswith(ENVIRONMENT_PREFIX) or name in secrets:
                continue
            names = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            try:
                self.set(names, _environment_value(value), name)
            except yaml.YAMLError as error:
                self.problems.append(Problem(name, ".".join(names), f"no YAML: {error}"))

    def set(self, names: list[str], value: Any, origin: str) -> None:
        raw: Any = self._raw
        for name in names[:-1]:
            raw = raw.setdefault(name, {})
            if not isinstance(raw, dict):
                self.problems.append(Problem(origin, ".".join(names), f"{name} is not a section"))
                return
        raw[names[-1]] = value
        self._origins[tuple(names)] = origin

    def convert(self) -> Config | None:
        """Without what is wrong, so that everything that is shows at once."""
        while len(self.problems) < MAX_PROBLEMS:
            try:
                return msgspec.convert(self._raw, Config, strict=False)
            except msgspec.ValidationError as error:
                place, text = _understood(str(error))
                self._add(place, text)
                if not _without(self._raw, place):
                    return None
        return None

    def check(self, config: Config) -> None:
        """What no type says."""
        try:
            check(config)
        except InvalidConfig as error:
            field, _, text = str(error).partition(": ")
            self._add((field,), text)
        for place, text in _wrong_addresses(config):
            self._add(place, text)

    def _add(self, place: Place, text: str) -> None:
        self.problems.append(Problem(self._where(place), _dotted(place), text))

    def _where(self, place: Place) -> str:
        for length in range(len(place), 0, -1):
            part = place[:length]
            if part in self._origins:
                return self._origins[part]
            if part in self._lines:
                return f"{self._file}:{self._lines[part]}"
        return self._file

    def _note_lines(self, node: yaml.Node, place: Place) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*place, str(key.value))
                if inner in self._lines:
                    self._add(inner, f"stands there twice, also in line {key.start_mark.line + 1}: keep one")
                self._lines[inner] = key.start_mark.line + 1
                self._note_lines(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._lines[*place, index] = value.start_mark.line + 1
                self._note_lines(value, (*place, index))


def _understood(message: str) -> tuple[Place, str]:
    """What msgspec says, by place and in words that tell what would be right."""
    at = _AT.search(message)
    text = _AT.sub("", message)
    place: Place = tuple(
        name or (int(index) if index.isdigit() else index)
        for name, index in _STEP.findall(at[1] if at else "")
    )
    quoted = _QUOTED.findall(text)
    if "unknown field" in text:
        return (*place, quoted[0]), _unknown(place, quoted[0])
    if "missing required field" in text:
        field = (*place, quoted[0])
        return field, f"is missing{_meaning(field)}"
    schema = _schema_at(place)
    choice = schema.get("enum") or next((s["enum"] for s in schema.get("anyOf", ()) if "enum" in s), None)
    if choice and "enum" in text:
        text = f"{text}, one of {', '.join(map(str, choice))} is expected"
    return place, text + _meaning(place)


def _unknown(place: Place, name: str) -> str:
    section = _schema_at(place)
    near = get_close_matches(name, section.get("properties", {}), n=1)
    if near:
        return f"no such setting; did you mean {_dotted((*place, near[0]))}?"
    elsewhere = [found for found in _settings() if found.rpartition(".")[2] == name]
    hint = f"did you mean {elsewhere[0]}?" if elsewhere else "docs/configuration.md lists all"
    return f"no such setting; {hint}"


def _meaning(place: Place) -> str:
    text = _schema_at(place).get("description", "")
    return f" ({text.rstrip('.')})" if text else ""


def _schema_at(place: Place) -> dict[str, Any]:
    """The part of the JSON schema that a place has; empty for one that is not there."""
    schema = _schema()
    node = _resolved({"$ref": schema["$ref"]}, schema)
    for step in place:
        node = node.get("items", {}) if isinstance(step, int) else node.get("properties", {}).get(step, {})
        node = _resolved(node, schema)
    return node


@cache
def _schema() -> dict[str, Any]:
    return json_schema()


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    return {**schema["$defs"][reference.rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}


def _settings(place: Place = ()) -> Iterator[str]:
    for name, node in _schema_at(place).get("properties", {}).items():
        inner = (*place, name)
        yield _dotted(inner)
        if "$ref" in node:
            yield from _settings(inner)


def _without(raw: Any, place: Place) -> bool:
    """Take a value out, or put one where it is missing; False where neither is possible."""
    for step in place[:-1]:
        try:
            raw = raw[step]
        except (KeyError, IndexError, TypeError):
            return False
    if not place or not isinstance(raw, dict):
        return False
    if place[-1] in raw:
        del raw[place[-1]]
    else:
        # Of what is required only a mode is more than any text.
        raw[place[-1]] = "observe"
    return True


def _wrong_addresses(config: Config) -> Iterator[tuple[Place, str]]:
    places: list[tuple[Place, str]] = [(("upstream", "url"), config.upstream.url)]
    places += [(("upstreams", at, "url"), each.url) for at, each in enumerate(config.upstreams)]
    for place, url in places:
        try:
            UpstreamTarget.parse(url)
        except ValueError as error:
            yield place, f"{error}; like http://host:8000 or unix:/run/engine.sock"
    if not config.log_url.startswith(_LOG_SCHEMES):
        yield ("log_url",), f"begins with none of {', '.join(_LOG_SCHEMES)}"
    if config.read_models_url and not config.read_models_url.startswith(_ROWS_SCHEMES):
        yield ("read_models_url",), f"begins with none of {', '.join(_ROWS_SCHEMES)}"
    if config.tracing.endpoint and not config.tracing.endpoint.startswith(("http://", "https://")):
        yield ("tracing", "endpoint"), "is no http(s) URL; like http://host:4318"
    data, admin = config.data, config.admin
    if data.port and (data.host, data.port) == (admin.host, admin.port):
        yield ("admin", "port"), f"{admin.port} is the data listener's: give each a port of its own"


def _environment_value(value: str) -> Any:
    return yaml.safe_load(value) if value.lstrip().startswith(("[", "{")) else value


def _secret_variables(raw: Any) -> Iterator[str]:
    """Environment variables that the file names as holding a secret."""
    if isinstance(raw, Mapping):
        for name, value in raw.items():
            if str(name).endswith("_env") and isinstance(value, str):
                yield value
            yield from _secret_variables(value)
    elif isinstance(raw, list):
        for item in raw:
            yield from _secret_variables(item)


def _dotted(place: Place) -> str:
    """As documents write it: `models[0].path`."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text
