"""Sends one hook of a harness that runs commands: standard input to `/kv/v1/hooks/{harness}`.

A program of its own, `hook_command.py HARNESS URL`, on the standard library alone, so that it starts in
hundredths of a second and needs no environment. It prints nothing, takes a second at most, and ends with 0
whatever happens: a hook must never change what its harness does. A key is read from `KVTETHER_API_KEY`.
"""

import http.client
import os
import sys
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

SECONDS = 1.0
MAX_BYTES = 1024 * 1024
"""What the proxy takes; a larger hook (the whole output of a tool) is not sent."""


def main(arguments: Sequence[str]) -> None:
    """Send what stands in standard input. Whatever goes wrong, nothing is said of it."""
    try:
        harness, url = arguments
        body = sys.stdin.buffer.read(MAX_BYTES + 1)
        if len(body) <= MAX_BYTES:
            post(url, harness, body)
    except Exception:  # noqa: BLE001, S110 - the harness must not hear of it
        pass


def post(url: str, harness: str, body: bytes) -> None:
    """POST it, and read no more of the answer than that it is there. Raises `OSError` and its like."""
    at = urlsplit(url)
    kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    connection = kind(at.hostname or "", at.port, timeout=SECONDS)
    headers = {"content-type": "application/json"}
    key = os.environ.get("KVTETHER_API_KEY", "")
    if key:
        headers["authorization"] = f"Bearer {key}"
    connection.request("POST", f"{at.path.rstrip('/')}/kv/v1/hooks/{harness}", body, headers)
    connection.getresponse()


if __name__ == "__main__":
    deadline = threading.Timer(SECONDS, os._exit, [0])
    deadline.daemon = True
    deadline.start()
    main(sys.argv[1:])
    os._exit(0)
