"""The compose file as `docker compose` would read it: variables put in, commands as lists of words."""

import re
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def interpolated(text: str, variables: dict[str, str]) -> str:
    """With `${NAME}`, `${NAME:-default}` and `${NAME:?message}` put in. `KeyError` where one is required."""

    def value(match: re.Match[str]) -> str:
        name, operator, argument = match.groups()
        if variables.get(name):
            return variables[name]
        if operator == "-":
            return argument
        raise KeyError(argument or name)

    return _VARIABLE.sub(value, text)


def compose(**variables: str) -> dict[str, Any]:
    """The document, with these variables beside the required ones. Values are put in after parsing."""
    given = {
        "MODEL_DIR": "/models/qwen3-8b",
        "CALL_KEY": "call-key",
        "OPERATOR_KEY": "operator-key",
        **variables,
    }

    def put_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put_in(item) for key, item in value.items()}
        if isinstance(value, list):
            return [put_in(item) for item in value]
        return interpolated(value, given) if isinstance(value, str) else value

    document: dict[str, Any] = put_in(yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text()))
    return document


def flags(service: dict[str, Any]) -> dict[str, str]:
    """Flags of a service's command with their values; "" for a switch."""
    words = service["command"]
    found = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            following = words[at + 1] if at + 1 < len(words) else "--"
            found[word] = "" if following.startswith("--") else following
    return found
