"""Codex's settings, in whatever its owner has already."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from proxy.codex_setup import EVENTS, codex_setup
from proxy.setup_files import SetupProblem, write_files

URL = "http://127.0.0.1:8700"
CONFIGS = [
    None,
    "",
    "# a comment\nmodel = 'mine' # and another\n\n[tui]\ntheme = \"dark\"",
    '[[things]]\na = 1\n[mcp_servers.docs]\ncommand = "docs"\n[model_providers.other]\nname = "o"\n',
    'text = """\n[no table]\nmodel_provider = \'no\'\n"""\n',
]


def settings(tmp_path: Path, config: str | None) -> dict[str, str]:
    if config is not None:
        (tmp_path / "config.toml").write_text(config)
    return {"CODEX_HOME": str(tmp_path)}


@pytest.mark.parametrize("config", CONFIGS)
def test_the_provider_is_added_and_taken_out_and_nothing_else_changes(
    tmp_path: Path, config: str | None
) -> None:
    environment = settings(tmp_path, config)
    write_files(codex_setup(environment, URL, "tiny", remove=False).files)
    text = (tmp_path / "config.toml").read_text()
    assert (config or "") in text
    after, before = tomllib.loads(text), tomllib.loads(config or "")
    assert after["model_provider"] == "kvtether"
    assert after["model"] == before.get("model", "tiny")
    assert after["model_providers"].pop("kvtether")["base_url"] == f"{URL}/v1"
    assert {**after, **before} == {**after, "model_providers": before.get("model_providers", {})} | before
    again = codex_setup(environment, URL, "tiny", remove=False)
    assert not any(file.changes for file in again.files)
    moved = codex_setup(environment, "http://10.0.0.1:1", "tiny", remove=False)
    assert all(file.changes and not file.backup for file in moved.files)
    write_files(codex_setup(environment, URL, "", remove=True).files)
    left = tmp_path / "config.toml"
    assert (left.read_text().rstrip("\n") if left.exists() else "") == (config or "").rstrip("\n")
    assert not any(file.changes for file in codex_setup(environment, URL, "", remove=True).files)


def test_each_hook_is_a_command_that_sends_it(tmp_path: Path) -> None:
    theirs = {"hooks": {"Stop": [{"hooks": [{"type": "command", "command": "say done"}]}]}, "more": 1}
    (tmp_path / "hooks.json").write_text(json.dumps(theirs))
    environment = settings(tmp_path, None)
    write_files(codex_setup(environment, URL, "", remove=False).files)
    document = json.loads((tmp_path / "hooks.json").read_text())
    assert set(document["hooks"]) == set(EVENTS)
    assert document["hooks"]["Stop"][0] == theirs["hooks"]["Stop"][0]  # type: ignore[index]
    command = shlex.split(document["hooks"]["SessionEnd"][0]["hooks"][0]["command"])
    assert command[-2:] == ["codex", URL]
    assert Path(command[-3]).is_file()
    write_files(codex_setup(environment, URL, "", remove=True).files)
    assert json.loads((tmp_path / "hooks.json").read_text()) == theirs


def test_a_provider_that_is_chosen_already_stays_chosen(tmp_path: Path) -> None:
    environment = settings(tmp_path, 'model_provider = "openai"\nmodel = "gpt"\n')
    wanted = codex_setup(environment, URL, "tiny", remove=False)
    write_files(wanted.files)
    after = tomllib.loads((tmp_path / "config.toml").read_text())
    assert (after["model_provider"], after["model"]) == ("openai", "gpt")
    assert "kvtether" in after["model_providers"]
    assert any("codex -c model_provider=kvtether" in note for note in wanted.notes)
    assert any("codex -m tiny" in note for note in wanted.notes)


def test_what_codex_puts_between_our_lines_stays_when_they_go(tmp_path: Path) -> None:
    environment = settings(tmp_path, "# mine\n")
    write_files(codex_setup(environment, URL, "tiny", remove=False).files)
    path = tmp_path / "config.toml"
    head, table, end = path.read_text().rpartition("# <<<")
    remembered = '\n[projects."/src"]\ntrust_level = "trusted"\n'
    head = head.replace("# <<<", 'model_reasoning_effort = "high"\n# <<<', 1)
    path.write_text(head + remembered + table + end)
    moved = codex_setup(environment, "http://10.0.0.1:1", "tiny", remove=False)
    write_files(moved.files)
    for text in (path.read_text(), codex_setup(environment, URL, "", remove=True).files[0].after or ""):
        document = tomllib.loads(text)
        assert document["projects"] == {"/src": {"trust_level": "trusted"}}
        assert document["model_reasoning_effort"] == "high"
        assert "# mine" in text
    assert "model_providers" not in document


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", "model = "),
        ("config.toml", "[model_providers.kvtether]\nname = 'his own'\n"),
        ("config.toml", "model_providers = {}\n"),
        ("hooks.json", "{"),
        ("hooks.json", '{"hooks": []}'),
        ("hooks.json", '{"hooks": {"Stop": {}}}'),
    ],
)
def test_what_cannot_be_added_to_is_left_as_it_is(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SetupProblem, match=name.replace(".", r"\.") if "Stop" not in text else "Stop"):
        codex_setup({"CODEX_HOME": str(tmp_path)}, URL, "", remove=False)
    assert [path.read_text() for path in tmp_path.iterdir()] == [text]


def test_without_codex_home_it_is_below_the_home_directory(tmp_path: Path) -> None:
    wanted = codex_setup({"HOME": str(tmp_path)}, URL, "", remove=False)
    assert {file.path.parent for file in wanted.files} == {tmp_path / ".codex"}
