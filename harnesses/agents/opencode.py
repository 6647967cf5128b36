"""opencode's own program, told by `kvtether setup opencode`: two turns, a subagent, a compaction between.

It is driven as its clients drive it, over the HTTP of `opencode serve`; at the end the session is deleted.
"""

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

NAME = "opencode"
API = "chat"
NODE = "20"
INTEGRATION = "settings"

ROOT = str(Path(__file__).resolve().parents[2])
TRUTH = os.environ["HARNESS_TRUTH"]
MODEL = {"providerID": "kvtether", "modelID": os.environ["HARNESS_MODEL"]}
QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_PERMISSION": json.dumps({"bash": "allow", "edit": "allow", "external_directory": "allow"}),
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


class Server:
    """The program, spoken to over HTTP."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["opencode", "serve", "--port", "0"],
            env={**os.environ, **QUIET},
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stdout:
            print(line, end="")
            found = re.search(r"http://\S+", line)
            if found:
                self.url = found[0]
                return
        raise SystemExit("opencode ended too early")

    def ask(self, method: str, path: str, **body: object) -> object:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=json.dumps(body).encode() if body else None,
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.loads(answer.read() or b"null")

    def say(self, session: str, text: str) -> str:
        parts = [{"type": "text", "text": text}]
        answer = self.ask("POST", f"/session/{session}/message", model=MODEL, parts=parts)
        return "\n".join(part["text"] for part in answer["parts"] if part["type"] == "text")


def main() -> None:
    # integration begins
    setup("opencode", "--write", "--base-url", os.environ["KVTETHER_URL"])
    # integration ends
    server = Server()
    session = server.ask("POST", "/session")["id"]
    did("context", ctx=session, **{"as": f"session:{session}"})
    server.say(session, os.environ["HARNESS_PROMPT"])
    server.ask("POST", f"/session/{session}/summarize", **MODEL)
    did("compact", ctx=session)
    answer = server.say(session, os.environ["HARNESS_PROMPT_2"])
    server.ask("DELETE", f"/session/{session}")
    did("close", ctx=session)
    time.sleep(1)  # the plugin tells of it behind the answer
    server.process.terminate()
    server.process.wait(timeout=20)
    did("done", answer=answer)


main()
