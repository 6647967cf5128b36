"""Hooks are put beside those that are there, and taken out from between them."""

import copy
from typing import Any

import pytest

from proxy.hook_settings import add_hooks, take_out_hooks
from proxy.setup_files import SetupProblem

OURS = {"type": "http", "url": "ours"}
THEIRS: dict[str, Any] = {
    "Stop": [{"matcher": "", "hooks": [{"type": "command", "command": "say done"}]}],
    "Notification": [],
    "Odd": ["whatever", {"hooks": None}],
}


def is_ours(hook: dict[str, Any]) -> bool:
    return hook.get("url") == "ours"


def test_what_was_put_in_comes_out_and_leaves_what_was_there() -> None:
    hooks = copy.deepcopy(THEIRS)
    add_hooks(hooks, ["Stop", "SessionEnd"], OURS)
    assert hooks["Stop"][0] == THEIRS["Stop"][0]
    assert take_out_hooks(hooks, is_ours) == [OURS, OURS]
    assert hooks == THEIRS


def test_from_a_group_that_its_owner_put_together_only_ours_is_taken() -> None:
    theirs = {"type": "command", "command": "say done"}
    hooks = {"Stop": [{"matcher": "x", "hooks": [theirs, OURS]}]}
    take_out_hooks(hooks, is_ours)
    assert hooks == {"Stop": [{"matcher": "x", "hooks": [theirs]}]}


def test_what_has_another_form_is_said_to_have() -> None:
    with pytest.raises(SetupProblem, match="is no list"):
        take_out_hooks({"Stop": {}}, is_ours)
