"""Hooks in the settings of Codex and Claude Code, which have one form: `{event: [{"hooks": [{…}]}]}`."""

from collections.abc import Callable, Sequence
from typing import Any

from proxy.setup_files import SetupProblem

Hook = dict[str, Any]


def add_hooks(hooks: dict[str, Any], events: Sequence[str], hook: Hook) -> None:
    """Put the hook behind whatever each event has already."""
    for event in events:
        hooks.setdefault(event, []).append({"hooks": [dict(hook)]})


def take_out_hooks(hooks: dict[str, Any], is_ours: Callable[[Hook], bool]) -> list[Hook]:
    """Take out our hooks, and what is empty without them; answers them. Raises `SetupProblem`."""
    found: list[Hook] = []
    for event, groups in list(hooks.items()):
        if not isinstance(groups, list):
            raise SetupProblem(f"hooks.{event} is no list")
        left = []
        for group in groups:
            inside = group.get("hooks") if isinstance(group, dict) else None
            ours = (
                [h for h in inside if isinstance(h, dict) and is_ours(h)] if isinstance(inside, list) else []
            )
            found += ours
            if not ours:
                left.append(group)
            elif len(ours) < len(inside or ()):
                left.append({**group, "hooks": [h for h in inside or () if h not in ours]})
        hooks[event] = left
        if groups and not left:
            del hooks[event]
    return found
