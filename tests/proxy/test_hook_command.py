"""The program that sends a hook: it says nothing, holds nobody up, and never fails."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy import hook_command

Seen = list[tuple[str, dict[str, str], bytes]]


@pytest.fixture
def listener() -> Iterator[tuple[str, Seen]]:
    """An address that takes hooks, and what it took."""
    seen: Seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(500)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


def run(*arguments: str, body: bytes = b"{}", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """As a harness runs it: alone, with no package beside it."""
    return subprocess.run(
        [sys.executable, "-I", "-S", hook_command.__file__, *arguments],
        input=body,
        capture_output=True,
        timeout=30,
        env={"PATH": os.environ["PATH"], **variables},
        check=False,
    )


def test_it_sends_what_it_was_given_and_says_nothing(listener: tuple[str, Seen]) -> None:
    url, seen = listener
    done = run("codex", url, body=b'{"hook_event_name": "Stop"}', KVTETHER_API_KEY="secret")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    [(path, headers, body)] = seen
    assert (path, body) == ("/kv/v1/hooks/codex", b'{"hook_event_name": "Stop"}')
    assert headers["authorization"] == "Bearer secret"


def test_what_nobody_would_take_is_not_sent(listener: tuple[str, Seen]) -> None:
    url, seen = listener
    assert run("codex", url, body=b"x" * (hook_command.MAX_BYTES + 1)).returncode == 0
    assert not seen


@pytest.mark.parametrize(
    "arguments", [[], ["codex"], ["codex", "no address"], ["codex", "http://127.0.0.1:1"]]
)
def test_nothing_that_is_wrong_is_heard_of(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_proxy_that_does_not_answer_holds_nobody_up_for_long(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        done = run("codex", f"http://127.0.0.1:{silent.getsockname()[1]}")
        # The bound is a second; what is above it is the time that a process takes to start here.
        assert time.monotonic() - begun < 15
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
