"""What a stack checks before it starts anything; running it is the e2e suite's work."""

from pathlib import Path

import pytest

from engine_bridge.stack.engine_stack import EngineStack
from engine_bridge.stack.environment import EngineEnvironment, EngineMissing


async def test_without_an_environment_nothing_starts(tmp_path: Path) -> None:
    constraints = tmp_path / "engine.txt"
    constraints.touch()
    stack = EngineStack(EngineEnvironment(tmp_path / "engine", constraints), run_dir=tmp_path / "run")
    with pytest.raises(EngineMissing):
        await stack.start()
    assert stack.pids() == {}
    await stack.stop()
