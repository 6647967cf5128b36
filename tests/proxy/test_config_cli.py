"""`kvtether config`: exit status 1 and a line for each problem; nothing secret is shown."""

import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from proxy.config_cli import config_app


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("KVTETHER_")]:
        monkeypatch.delenv(name)


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(config_app, arguments, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_a_good_file_is_found_and_said_to_be_good(tmp_path: Path) -> None:
    assert run("validate") == (0, "ok   no file: defaults and environment\n")
    Path("kvtether.yaml").write_text("mode: observe\n")
    assert run("validate") == (0, "ok   kvtether.yaml\n")


def test_every_problem_is_a_line_and_the_status_is_1(tmp_path: Path) -> None:
    Path("c.yaml").write_text("upstream: {urll: x}\nmode: often\n")
    status, said = run("validate", "--config", "c.yaml", env={"KVTETHER_NONSENSE": "1"})
    assert status == 1
    assert said.count("fix ") == 3
    assert "c.yaml:1: upstream.urll: no such setting; did you mean upstream.url?" in said
    assert "KVTETHER_NONSENSE" in said
    assert run("validate", "--config", "nowhere.yaml")[0] == 1


def test_what_would_stop_a_start_here_is_told(tmp_path: Path) -> None:
    Path("c.yaml").write_text(
        "data: {host: 0.0.0.0}\nkeys_file: k.json\napi_keys: [{tenant: t, key_env: NOT_SET}]\n"
        "models: [{path: /nowhere}]\n"
    )
    status, said = run("validate", "--config", "c.yaml")
    assert status == 1
    assert "tenant 't'" in said
    assert "keys_file: k.json is not there" in said
    assert "note models: /nowhere is no directory here" in said
    Path("c.yaml").write_text("data: {host: 0.0.0.0}\n")
    status, said = run("validate", "--config", "c.yaml")
    assert status == 1
    assert "keyless_network" in said


def test_settings_are_shown_from_everywhere_without_passwords(tmp_path: Path) -> None:
    Path("kvtether.yaml").write_text("log_url: redis://:hunter2@h:6379/0\nholdout: 0.25\n")
    env = {"KVTETHER_MODE": "enforce", "KVTETHER_READ_MODELS_URL": "postgresql://me:hunter2@h/d"}
    status, said = run("show", env=env)
    assert status == 0
    document = yaml.safe_load(said)
    assert (document["mode"], document["holdout"]) == ("enforce", 0.25)
    assert document["admin"] == {"host": "127.0.0.1", "port": 8701}
    assert document["log_url"] == "redis://:***@h:6379/0"
    assert document["read_models_url"] == "postgresql://me:***@h/d"
    assert run("show", env={"KVTETHER_MODE": "often"})[0] == 1
