"""The pages' examples run, and do what the pages say."""

import os
import subprocess
import sys

from tests.architecture.deployment import REPOSITORY
from tests.architecture.test_readme import README, blocks
from tests.sdk.ops_server import SECONDS, OpsServer

PAGE = (REPOSITORY / "docs" / "sdk.md").read_text()
RUN = "import sys\nfor block in sys.argv[1:]:\n    exec(compile(block, block, 'exec'), {})"


def run(server: OpsServer, *command: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "sdk"),
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "any",
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_examples(server):
    examples = blocks(PAGE, "python")
    run(server, "-c", RUN, *examples)
    assert len(examples) == 6
    used = {operation["op"] for operation in server.applied}
    assert {"append", "replace", "remove", "close"} <= used
    closed = {op["ctx"] for op in server.applied if op["op"] == "close"}
    singles = {
        headers["x-kv-lifecycle"] for headers, _ in server.calls if "one_off" in headers["x-kv-lifecycle"]
    }
    assert len(closed) == 4, "each that called"
    assert len(singles) == 1, "the summariser"


def test_the_readmes_examples(server):
    ours = [b.replace("http://127.0.0.1:8700", server.url) for b in blocks(README, "python")]
    run(server, "-c", RUN, *ours)
    assert len(server.calls) == len(ours) == 2
    assert server.kinds() == ["replace", "close"]


def test_the_example_file(server):
    printed = run(server, str(REPOSITORY / "examples" / "sdk.py"), f"{server.url}/v1")
    assert printed.splitlines()[-1] == "closed"
    kinds = [op["op"] for op in server.applied]
    assert (kinds.count("fork"), kinds.count("replace"), kinds.count("close")) == (1, 1, 2)
