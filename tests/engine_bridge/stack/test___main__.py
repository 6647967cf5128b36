"""The command line: it must come up on a bare Python, before anything is installed."""

import subprocess
import sys

from engine_bridge.stack.environment import REPOSITORY


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it without site packages: the standard library is all an empty clone has."""
    line = [sys.executable, "-S", "-m", "engine_bridge.stack", *arguments]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_help_works_on_a_bare_python() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "install" in done.stdout
    assert "run" in done.stdout


def test_an_unknown_command_is_refused() -> None:
    assert command("uninstall").returncode == 2
