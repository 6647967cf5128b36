"""opencode's settings: a provider in `opencode.json`, and a plugin beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
PLUGIN = Path(__file__).with_name("opencode_plugin.js")
KEY = "{env:KVTETHER_API_KEY}"
"""opencode puts the variable's value in its place; nothing, if there is none."""


def opencode_setup(environment: Mapping[str, str], base_url: str, model: str, *, remove: bool) -> Setup:
    """What changes in opencode's own folder. `model` is what the proxy serves. Raises `SetupProblem`."""
    home = Path(environment.get("HOME", "~")).expanduser()
    folder = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "opencode"
    plugin = _plugin(folder / "plugin" / "kvtether.js", remove)
    if remove:
        return Setup((_without(folder / "opencode.json"), plugin))
    if not model:
        raise SetupProblem(f"{base_url} does not say which model it serves: start it first, or give --model")
    config, notes = _with(folder / "opencode.json", base_url, model)
    key = "If the proxy wants a key, put it into KVTETHER_API_KEY: hooks and calls take it from there."
    return Setup((config, plugin), (*notes, key))


def _with(path: Path, base_url: str, model: str) -> tuple[SettingsFile, tuple[str, ...]]:
    if path.with_suffix(".jsonc").exists():
        raise SetupProblem(
            f"{path.with_suffix('.jsonc')} is the file in use: put in by hand what a folder without it prints"
        )
    before = read_text(path)
    document, had_ours = _taken_out(path, before)
    ours = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "KVTether",
        "options": {"baseURL": f"{base_url}/v1", "apiKey": KEY},
        "models": {model: {"name": model}},
    }
    inner_object(path, document, "provider")[PROVIDER] = ours
    added: dict[str, Any] = {"provider": {PROVIDER: ours}}
    named, notes = f"{PROVIDER}/{model}", []
    if "model" in document:
        notes.append(f"model is {document['model']!r} and stays: opencode -m {named}")
    else:
        document["model"] = added["model"] = named
    return SettingsFile(
        path, before, rewritten(path, before, document), write_object(added), had_ours
    ), tuple(notes)


def _without(path: Path) -> SettingsFile:
    before = read_text(path)
    document, had_ours = _taken_out(path, before)
    after = rewritten(path, before, document) if had_ours else before
    return SettingsFile(path, before, after, had_ours=had_ours)


def _taken_out(path: Path, before: str | None) -> tuple[dict[str, Any], bool]:
    document = read_object(path, before)
    num_before = len(write_object(document))
    providers = document.get("provider")
    if isinstance(providers, dict) and providers.pop(PROVIDER, None) is not None and not providers:
        del document["provider"]
    if str(document.get("model", "")).startswith(f"{PROVIDER}/"):
        del document["model"]
    return document, len(write_object(document)) != num_before


def _plugin(path: Path, remove: bool) -> SettingsFile:
    before, ours = read_text(path), PLUGIN.read_text(encoding="utf-8")
    mark = ours.splitlines()[0]
    if before is not None and not before.startswith(mark):
        if remove:
            return SettingsFile(path, before, before)
        raise SetupProblem(f"{path} is somebody else's: move it away first")
    return SettingsFile(path, before, None if remove else ours, ours, before is not None)
