"""Claude Code's own program, told by `kvtether setup claude-code`: two turns, a subagent, a compaction."""

import json
import os
import subprocess
from pathlib import Path

NAME = "claude-code"
API = "messages"
NODE = "20"
INTEGRATION = "settings"

ROOT = str(Path(__file__).resolve().parents[2])
TRUTH = os.environ["HARNESS_TRUTH"]
QUIET = {
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "IS_SANDBOX": "1",
}


def did(what: str, **told: object) -> None:
    with open(TRUTH, "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


def setup(*arguments: str) -> None:
    program = "from proxy.cli import main; main()"
    subprocess.run(
        [os.environ["HARNESS_PYTHON"], "-c", program, "setup", *arguments],
        env={**os.environ, "PYTHONPATH": ROOT},
        check=True,
    )


def start() -> subprocess.Popen:
    """The program, spoken to by lines of JSON. Its settings name the proxy, not the environment."""
    variables = {name: value for name, value in os.environ.items() if name != "ANTHROPIC_BASE_URL"}
    streams = ("--input-format", "stream-json", "--output-format", "stream-json", "--verbose")
    allowed = ("--dangerously-skip-permissions", "--model", os.environ["HARNESS_MODEL"])
    return subprocess.Popen(
        ["claude", "-p", *streams, *allowed],
        env={**variables, **QUIET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def say(program: subprocess.Popen, text: str) -> dict:
    """One turn; answers its result."""
    message = {"type": "user", "message": {"role": "user", "content": text}}
    program.stdin.write(json.dumps(message) + "\n")
    program.stdin.flush()
    for line in program.stdout:
        print(line[:300], end="" if line[:300].endswith("\n") else "\n")
        told = json.loads(line)
        if told.get("type") == "result":
            return told
    raise SystemExit("Claude Code ended too early")


def main() -> None:
    # integration begins
    setup("claude-code", "--write", "--base-url", os.environ["KVTETHER_URL"])
    # integration ends
    program = start()
    session = say(program, os.environ["HARNESS_PROMPT"])["session_id"]
    did("context", ctx=session, **{"as": f"claude-code:{session}"})
    say(program, "/compact")
    did("compact", ctx=session)
    answer = say(program, os.environ["HARNESS_PROMPT_2"])["result"]
    program.stdin.close()
    program.wait(timeout=20)
    did("close", ctx=session)
    did("done", answer=answer)


main()
