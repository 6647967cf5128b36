"""Claude Code's settings, in whatever its owner has already."""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.claude_code_setup import EVENTS, claude_code_setup
from proxy.setup_files import SetupProblem, write_files

URL = "http://127.0.0.1:8700"
THEIRS: dict[str, Any] = {
    "model": "opus",
    "env": {"FOO": "1"},
    "hooks": {"Stop": [{"hooks": [{"type": "command", "command": "say done"}]}]},
}


@pytest.mark.parametrize("before", [None, {}, {"hooks": {}, "env": {}}, THEIRS])
def test_what_is_added_is_taken_out_again(tmp_path: Path, before: dict[str, Any] | None) -> None:
    path, environment = tmp_path / "settings.json", {"CLAUDE_CONFIG_DIR": str(tmp_path)}
    if before is not None:
        path.write_text(json.dumps(before))
    write_files(claude_code_setup(environment, URL, "tiny", remove=False).files)
    after = json.loads(path.read_text())
    assert after["env"]["ANTHROPIC_BASE_URL"] == URL
    assert after["env"]["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert set(after["hooks"]) == set(EVENTS)
    hook = after["hooks"]["PostCompact"][0]["hooks"][0]
    assert (hook["type"], hook["url"]) == ("http", f"{URL}/kv/v1/hooks/claude-code")
    if before:
        assert {**after, "env": 0, "hooks": 0} == {**before, "env": 0, "hooks": 0}
    assert not claude_code_setup(environment, URL, "tiny", remove=False).files[0].changes
    moved = claude_code_setup(environment, "http://10.0.0.1:1", "tiny", remove=False).files
    write_files(moved)
    assert "127.0.0.1" not in path.read_text()
    write_files(claude_code_setup(environment, URL, "", remove=True).files)
    left = json.loads(path.read_text()) if path.exists() else {}
    assert {k: v for k, v in left.items() if v} == {k: v for k, v in (before or {}).items() if v}
    assert not claude_code_setup(environment, URL, "", remove=True).files[0].changes


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"env": []}',
        '{"hooks": 1}',
        '{"hooks": {"Stop": 1}}',
        '{"env": {"ANTHROPIC_BASE_URL": "https://gateway"}}',
        '{"a": 1} // comment',
    ],
)
def test_what_cannot_be_added_to_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(SetupProblem):
        claude_code_setup({"CLAUDE_CONFIG_DIR": str(tmp_path)}, URL, "", remove=False)
    assert [each.read_text() for each in tmp_path.iterdir()] == [text]
