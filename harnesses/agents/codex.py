"""Codex's own program, told by `kvtether setup codex`: two turns, a subagent, a compaction between them.

It is driven as an editor drives it, by its app server; its hooks are trusted here as a user trusts them once.
"""

import json
import os
import subprocess
from pathlib import Path

NAME = "codex"
API = "responses"
NODE = "20"
INTEGRATION = "settings"

ROOT = str(Path(__file__).resolve().parents[2])
TRUTH = os.environ["HARNESS_TRUTH"]
QUIET = ("check_for_update_on_startup=false", "analytics.enabled=false", "features.apps=false")
ALONE = (*QUIET, "features.plugins=false", f'model="{os.environ["HARNESS_MODEL"]}"')


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


class AppServer:
    """The program, spoken to by lines of JSON."""

    def __init__(self) -> None:
        options = [word for option in ALONE for word in ("-c", option)]
        self.process = subprocess.Popen(
            ["codex", *options, "app-server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.number = 0
        self.said = ""

    def ask(self, method: str, **params: object) -> dict:
        self.number += 1
        self.tell(method, id=self.number, params=params)
        return self.until(lambda m: m.get("id") == self.number and "method" not in m)

    def tell(self, method: str, **fields: object) -> None:
        self.process.stdin.write(json.dumps({"method": method, **fields}) + "\n")
        self.process.stdin.flush()

    def until(self, wanted) -> dict:
        for line in self.process.stdout:
            message = json.loads(line)
            print(line[:300], end="")
            item = message.get("params", {}).get("item", {})
            if message.get("method") == "item/completed" and item.get("type") == "agentMessage":
                self.said = item["text"]
            if wanted(message):
                return message
        raise SystemExit("codex ended too early")

    def trust_hooks(self) -> None:
        """What the question does that a terminal asks at the first start."""
        listed = self.ask("hooks/list", cwds=[os.getcwd()])["result"]["data"][0]["hooks"]
        state = {hook["key"]: {"trusted_hash": hook["currentHash"]} for hook in listed}
        self.ask("config/value/write", keyPath="hooks.state", value=state, mergeStrategy="upsert")

    def turn(self, thread: str, text: str) -> str:
        self.ask("turn/start", threadId=thread, input=[{"type": "text", "text": text}])
        self.until(lambda m: m.get("method") == "turn/completed" and m["params"]["threadId"] == thread)
        return self.said


def main() -> None:
    # integration begins
    setup("codex", "--write", "--base-url", os.environ["KVTETHER_URL"])
    # integration ends
    server = AppServer()
    server.ask("initialize", clientInfo={"name": "harness", "version": "1"})
    server.tell("initialized")
    server.trust_hooks()
    allowed = {"approvalPolicy": "never", "sandbox": "danger-full-access"}
    thread = server.ask("thread/start", cwd=os.getcwd(), **allowed)["result"]["thread"]["id"]
    did("context", ctx=thread, **{"as": f"codex:{thread}"})
    server.turn(thread, os.environ["HARNESS_PROMPT"])
    server.ask("thread/compact/start", threadId=thread)
    server.until(lambda m: m.get("method") == "turn/completed" and m["params"]["threadId"] == thread)
    did("compact", ctx=thread)
    answer = server.turn(thread, os.environ["HARNESS_PROMPT_2"])
    server.process.stdin.close()
    server.process.wait(timeout=20)
    did("close", ctx=thread)
    did("done", answer=answer)


main()
