"""Claude Code's settings: the proxy's address and hooks over HTTP, in `settings.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

EVENTS = (
    "UserPromptSubmit",
    "PreToolUse",
    "PostToolUse",
    "PostToolUseFailure",
    "PermissionRequest",
    "Notification",
    "PreCompact",
    "PostCompact",
    "SubagentStart",
    "SubagentStop",
    "Stop",
    "StopFailure",
    "SessionEnd",
)
"""`SessionStart` is not among them: Claude Code posts that one to nobody."""

HOOK_SECONDS = 2
HOOKS_PATH = "/kv/v1/hooks/claude-code"

_BASE_URL, _ATTRIBUTION = "ANTHROPIC_BASE_URL", "CLAUDE_CODE_ATTRIBUTION_HEADER"


def claude_code_setup(environment: Mapping[str, str], base_url: str, model: str, *, remove: bool) -> Setup:
    """What changes in `$CLAUDE_CONFIG_DIR`. `model` is what the proxy serves. Raises `SetupProblem`."""
    home = Path(environment.get("HOME", "~")).expanduser()
    path = Path(environment.get("CLAUDE_CONFIG_DIR") or home / ".claude") / "settings.json"
    before = read_text(path)
    document = read_object(path, before)
    had_ours = _take_out(path, document)
    if remove:
        after = rewritten(path, before, document) if had_ours else before
        return Setup((SettingsFile(path, before, after, had_ours=had_ours),))
    variables = inner_object(path, document, "env")
    other = variables.get(_BASE_URL)
    if other not in (None, base_url):
        raise SetupProblem(
            f"{path} has {_BASE_URL} {other!r} already, and there can be one: take it out first"
        )
    ours = {_BASE_URL: base_url, _ATTRIBUTION: "0"}
    hook = {
        "type": "http",
        "url": base_url + HOOKS_PATH,
        "headers": {"x-api-key": "$KVTETHER_API_KEY"},
        "allowedEnvVars": ["KVTETHER_API_KEY"],
        "timeout": HOOK_SECONDS,
    }
    alone: dict[str, Any] = {}
    add_hooks(alone, EVENTS, hook)
    variables |= ours
    add_hooks(inner_object(path, document, "hooks"), EVENTS, hook)
    added = write_object({"env": ours, "hooks": alone})
    served = (f"The proxy serves {model}: claude --model {model}",) if model else ()
    key = (
        "If the proxy wants a key, put it into ANTHROPIC_API_KEY for calls, and into KVTETHER_API_KEY for"
        " hooks: Claude Code hands the first to no hook.",
    )
    return Setup(
        (SettingsFile(path, before, rewritten(path, before, document), added, had_ours),), (*served, *key)
    )


def _take_out(path: Path, document: dict[str, Any]) -> bool:
    """Take out what an earlier setup put in, and say whether it had: with its hooks go the variables that
    stand for the same proxy."""
    before = set(document)
    hooks = inner_object(path, document, "hooks")
    variables = inner_object(path, document, "env")
    found = take_out_hooks(hooks, _is_ours)
    addresses = {str(hook["url"]).removesuffix(HOOKS_PATH) for hook in found}
    if variables.get(_BASE_URL) in addresses:
        del variables[_BASE_URL]
        if variables.get(_ATTRIBUTION) == "0":
            del variables[_ATTRIBUTION]
    for name, had in (("hooks", found), ("env", addresses)):
        if not document[name] and (had or name not in before):
            del document[name]
    return bool(found)


def _is_ours(hook: Hook) -> bool:
    url = hook.get("url")
    return isinstance(url, str) and url.endswith(HOOKS_PATH)
