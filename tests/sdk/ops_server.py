"""A server that takes operations as a proxy does, or as something else does that stands in its place."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECONDS = 30.0
"""Bound of every wait."""

Operation = dict[str, Any]
Verdicts = Callable[[str, list[Operation]], list[dict[str, Any]]]


class OpsServer:
    """What came is kept in order; `status` and `verdicts` say what is answered, `open` whether at all.

    Operations are applied once, in order, per source and context, as the proxy does it.
    """

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.verdicts: Verdicts | None = None
        self.answer = threading.Event()
        self.answer.set()
        self.applied: list[Operation] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.came = threading.Condition()
        self._seen: dict[tuple[str, str], int] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.keys.add(self.headers.get("authorization", ""))
                status, document = outer.take(self.path, body)
                payload = json.dumps(document).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(payload)), **outer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.came:
            self.requests.append({"path": path, **body})
            self.came.notify_all()
        assert self.answer.wait(SECONDS)
        if self.status != 200:
            return self.status, {"error": "no"}
        if self.verdicts is not None:
            return 200, {"results": self.verdicts(body["source"], body["ops"])}
        with self.came:
            results = [self._apply(body["source"], operation) for operation in body["ops"]]
            self.came.notify_all()
        return 200, {"results": results}

    def _apply(self, source: str, operation: Operation) -> dict[str, Any]:
        key = (source, operation["ctx"])
        last = self._seen.get(key, 0)
        told = {"seq": operation["seq"], "ctx": operation["ctx"]}
        if operation["seq"] <= last:
            return {"status": "duplicate", **told}
        assert operation["seq"] == last + 1, f"{operation} after {last}"
        self._seen[key] = operation["seq"]
        self.applied.append(operation)
        return {"status": "applied", **told}

    def until(self, holds: Callable[["OpsServer"], bool]) -> None:
        with self.came:
            assert self.came.wait_for(lambda: holds(self), SECONDS)

    def kinds(self, ctx: str | None = None) -> list[str]:
        return [op["op"] for op in self.applied if ctx in (None, op["ctx"])]


@contextmanager
def ops_server() -> Iterator[OpsServer]:
    server = OpsServer()
    thread = threading.Thread(target=server._server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.answer.set()
        server._server.shutdown()
        thread.join()
        server._server.server_close()
