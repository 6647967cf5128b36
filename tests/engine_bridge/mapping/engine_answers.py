"""What vLLM's own code makes of requests, asked in the engine's environment, without an engine."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.engine_bridge.mapping.conversations import NPM

ENGINE_PYTHON = Path(__file__).resolve().parents[3] / ".engine" / "venv" / "bin" / "python"
SECONDS = 300


def engine_prompts(
    model: str, jobs: list[dict[str, Any]], oracle: str = "api_oracle"
) -> list[dict[str, Any]]:
    """An answer a job: `ids` of its prompts, or an `error`. `oracle` names the script that gives them."""
    done = subprocess.run(
        [ENGINE_PYTHON, Path(__file__).parent / f"{oracle}.py", NPM / model / "models"],
        input="\n".join(map(json.dumps, jobs)),
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
