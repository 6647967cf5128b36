"""The pages' examples run, and do what the pages say."""

import os
import subprocess
import sys

from tests.architecture.deployment import REPOSITORY
from tests.architecture.test_readme import README, blocks
from tests.sdk.ops_server import SECONDS, lifecycle_of

PAGE = (REPOSITORY / "docs" / "sdk.md").read_text()
EXAMPLE = REPOSITORY / "examples" / "sdk.py"
RUN = """
import sys
url, blocks, sys.argv = sys.argv[1], sys.argv[2:], ["sdk.py", sys.argv[1]]
for block in blocks:
    exec(compile(block, block[:40], "exec"), {})
"""


def test_the_pages_examples_run_and_do_what_the_pages_say(server):
    url = f"{server.url}/v1"
    page, readme = blocks(PAGE, "python"), blocks(README, "python")
    examples = [*page, *readme, EXAMPLE.read_text()]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "sdk"),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "any",
        "NO_PROXY": "*",
    }
    here = [each.replace("http://127.0.0.1:8700", server.url) for each in examples]
    done = subprocess.run(
        [sys.executable, "-c", RUN, url, *here],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "closed"
    assert (len(page), len(readme)) == (6, 2)
    said = [lifecycle_of(headers) for headers, _ in server.calls]
    singles = {each["ctx"] for each in said if "one_off" in each}
    called = {each["ctx"] for each in said} - {"run-7"}  # the README's first agent has no SDK
    assert len(singles) == 2, "the page's summariser and the example's"
    closed = {op["ctx"] for op in server.applied if op["op"] == "close"}
    assert called - singles == closed, "each that called is closed in the end"
    assert {op["op"] for op in server.applied} == {"append", "replace", "remove", "fork", "close"}
