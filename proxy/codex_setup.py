"""Codex's settings: a provider in `config.toml`, and hooks in `hooks.json`.

The TOML is never written anew, so that comments and order stay: our lines stand between marks, those that
belong to no table at the top, the provider's table at the end. Codex itself puts what it remembers between
the marks, too (it takes the last one for the end of the file): only what is known to be ours is taken out.
"""

import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy import hook_command
from proxy.hook_settings import Hook, add_hooks, take_out_hooks
from proxy.setup_files import (
    SettingsFile,
    Setup,
    SetupProblem,
    inner_object,
    read_object,
    read_text,
    rewritten,
    write_object,
)

PROVIDER = "kvtether"

EVENTS = (
    "SessionStart",
    "UserPromptSubmit",
    "PreCompact",
    "PostCompact",
    "SubagentStart",
    "SubagentStop",
    "PermissionRequest",
    "Stop",
    "SessionEnd",
)
"""Hooks worth a process each. That a tool runs, and which, the answer of the call has said already."""

HOOK_SECONDS = 2

_BEGIN, _END = "# >>> kvtether setup", "# <<< kvtether setup"
_MARKED = re.compile(rf"^{_BEGIN}\n(.*?)^{_END}\n", re.S | re.M)
_OUR_KEYS = re.compile(rf'(model_provider = "{PROVIDER}"|model = .*)$')


def codex_setup(environment: Mapping[str, str], base_url: str, model: str, *, remove: bool) -> Setup:
    """What changes in `$CODEX_HOME`. Raises `SetupProblem`."""
    folder = Path(environment.get("CODEX_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".codex")
    config, notes = _config(folder / "config.toml", base_url, model, remove)
    hooks = _hooks(folder / "hooks.json", base_url, remove)
    if not remove:
        notes = (
            *notes,
            "Codex runs no hook that you have not looked at: start it, and trust the new ones with /hooks.",
            "If the proxy wants a key, put it into KVTETHER_API_KEY: hooks and calls take it from there.",
        )
    return Setup((config, hooks), notes)


def _config(path: Path, base_url: str, model: str, remove: bool) -> tuple[SettingsFile, tuple[str, ...]]:
    before = read_text(path)
    theirs = _MARKED.sub(_not_ours, before or "")
    known, had_ours = _parsed(path, theirs), theirs != (before or "")
    if remove:
        after = None if before is None or (had_ours and not theirs.strip()) else theirs
        return SettingsFile(path, before, after, had_ours=had_ours), ()
    if PROVIDER in (known.get("model_providers") or {}):
        raise SetupProblem(f"{path} has a provider {PROVIDER} of its own: take it out first")
    top, table = [], _table(base_url)
    notes = []
    if "model_provider" not in known:
        top.append(f"model_provider = {_quoted(PROVIDER)}")
    else:
        notes.append(
            f"model_provider is {known['model_provider']!r} and stays: codex -c model_provider={PROVIDER}"
        )
    if "model" not in known and model:
        top.append(f"model = {_quoted(model)}")
    elif model and known["model"] != model:
        notes.append(f"model is {known['model']!r} and stays; the proxy serves {model!r}: codex -m {model}")
    head = _marked(top) if top else ""
    gap = "" if not theirs or theirs.endswith("\n") else "\n"
    after = head + theirs + gap + _marked(table)
    expected = {
        **known,
        **_parsed(path, head),
        "model_providers": {
            **(known.get("model_providers") or {}),
            **_parsed(path, "\n".join(table))["model_providers"],
        },
    }
    if _parsed(path, after) != expected:
        raise SetupProblem(f"{path} would not mean the same as before: put in by hand what is printed")
    return SettingsFile(path, before, after, head + _marked(table), had_ours), tuple(notes)


def _not_ours(marked: re.Match[str]) -> str:
    """What somebody else put between the marks."""
    left, table = [], ""
    for line in marked[1].splitlines(keepends=True):
        if line.startswith("["):
            table = line.strip()
        ours = table == f"[model_providers.{PROVIDER}]" or (not table and _OUR_KEYS.match(line))
        if not ours:
            left.append(line)
    return "".join(left)


def _table(base_url: str) -> list[str]:
    return [
        f"[model_providers.{PROVIDER}]",
        'name = "KVTether"',
        f"base_url = {_quoted(base_url + '/v1')}",
        'wire_api = "responses"',
        'env_http_headers = { "x-api-key" = "KVTETHER_API_KEY" }',
    ]


def _hooks(path: Path, base_url: str, remove: bool) -> SettingsFile:
    before = read_text(path)
    document = read_object(path, before)
    hooks = inner_object(path, document, "hooks")
    found = take_out_hooks(hooks, _is_ours)
    if remove:
        if not found:
            return SettingsFile(path, before, before)
        if not hooks:
            del document["hooks"]
        return SettingsFile(path, before, rewritten(path, before, document), had_ours=True)
    hook = {"type": "command", "command": _command(base_url), "timeout": HOOK_SECONDS}
    alone: dict[str, Any] = {}
    add_hooks(alone, EVENTS, hook)
    add_hooks(hooks, EVENTS, hook)
    return SettingsFile(
        path, before, rewritten(path, before, document), write_object({"hooks": alone}), bool(found)
    )


def _command(base_url: str) -> str:
    """Isolated and without site-packages: it needs neither, and starts in half the time."""
    return shlex.join([sys.executable, "-I", "-S", str(Path(hook_command.__file__)), "codex", base_url])


def _is_ours(hook: Hook) -> bool:
    command = hook.get("command")
    return isinstance(command, str) and Path(hook_command.__file__).name in command and " codex " in command


def _marked(lines: list[str]) -> str:
    return "\n".join([_BEGIN, *lines, _END]) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SetupProblem(f"{path} is no TOML ({error}): correct it first") from error
