"""opencode's settings and its plugin, in whatever its owner has already."""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.opencode_setup import PLUGIN, opencode_setup
from proxy.setup_files import SetupProblem, write_files

URL = "http://127.0.0.1:8700"
THEIRS: dict[str, Any] = {"theme": "dark", "provider": {"other": {"npm": "x"}}, "model": "other/big"}


@pytest.mark.parametrize("before", [None, {"theme": "dark"}, THEIRS])
def test_what_is_added_is_taken_out_again(tmp_path: Path, before: dict[str, Any] | None) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    config, plugin = tmp_path / "opencode/opencode.json", tmp_path / "opencode/plugin/kvtether.js"
    if before is not None:
        config.parent.mkdir()
        config.write_text(json.dumps(before))
    wanted = opencode_setup(environment, URL, "tiny", remove=False)
    write_files(wanted.files)
    after = json.loads(config.read_text())
    assert after["provider"]["kvtether"]["options"]["baseURL"] == f"{URL}/v1"
    assert list(after["provider"]["kvtether"]["models"]) == ["tiny"]
    assert after["model"] == (before or {}).get("model", "kvtether/tiny")
    assert any("opencode -m kvtether/tiny" in note for note in wanted.notes) == (before is THEIRS)
    assert plugin.read_text() == PLUGIN.read_text()
    assert not any(f.changes for f in opencode_setup(environment, URL, "tiny", remove=False).files)
    write_files(opencode_setup(environment, URL, "", remove=True).files)
    assert (json.loads(config.read_text()) if config.exists() else None) == before
    assert not plugin.exists()
    assert not any(f.changes for f in opencode_setup(environment, URL, "", remove=True).files)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("opencode.json", "{"),
        ("opencode.json", '{"provider": 1}'),
        ("opencode.jsonc", "{}"),
        ("plugin/kvtether.js", "// somebody else's"),
    ],
)
def test_what_cannot_be_added_to_is_left_as_it_is(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "opencode" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(SetupProblem):
        opencode_setup({"XDG_CONFIG_HOME": str(tmp_path)}, URL, "tiny", remove=False)
    assert [each.read_text() for each in tmp_path.rglob("*.js*")] == [text]


def test_a_provider_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(SetupProblem, match="--model"):
        opencode_setup({"HOME": str(tmp_path)}, URL, "", remove=False)
