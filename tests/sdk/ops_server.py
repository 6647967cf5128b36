"""A model's server that takes operations as a proxy does, or as what else may stand in its place."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import http_sf

from lifecycle.vocabulary import CALL_HEADER, CONTEXT_HEADER, LIFECYCLE_BODY_FIELD, LIFECYCLE_HEADER

SECONDS = 30.0
"""Bound of every wait."""

Operation = dict[str, Any]
Verdicts = Callable[[str, list[Operation]], list[dict[str, Any]]]


class OpsServer:
    """What came is kept in order.

    To operations, `status` and `verdicts` say what is answered (those that raise `OSError` hang up), and
    `answer` whether at all. They are applied once, in order, per source and context, as the proxy does it. A
    chat call is answered; as a proxy would if `is_proxy`.
    """

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.verdicts: Verdicts | None = None
        self.answer = threading.Event()
        self.answer.set()
        self.is_proxy = True
        self.calls: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.applied: list[Operation] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.came = threading.Condition()
        self._seen: dict[tuple[str, str], int] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                if self.path.startswith("/v1/"):
                    status, document, extra = outer.chat(headers, body)
                else:
                    outer.keys.add(headers.get("authorization", ""))
                    try:
                        status, document = outer.take(self.path, body)
                    except OSError:
                        self.close_connection = True
                        return
                    extra = outer.headers
                payload = json.dumps(document).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(payload)), **extra}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def chat(
        self, headers: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        with self.came:
            self.calls.append((headers, body))
        message = {"role": "assistant", "content": f"answer {len(self.calls)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        document = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        document["usage"] = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        if not self.is_proxy:
            return 200, document, {"content-type": "application/json"}
        said = lifecycle_of(headers) if LIFECYCLE_HEADER in headers else {}
        told = {CONTEXT_HEADER: str(said.get("ctx", "c-1")), CALL_HEADER: str(said.get("call", "k-1"))}
        riding = body.get(LIFECYCLE_BODY_FIELD, {})
        with self.came:
            for operation in riding.get("ops", ()):
                self.apply(riding["source"], operation)
        return 200, document, {"content-type": "application/json", **told}

    def take(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.came:
            self.requests.append({"path": path, **body})
            self.came.notify_all()
        assert self.answer.wait(SECONDS)
        if self.status != 200:
            return self.status, {"error": "no"}
        if self.verdicts is not None:
            return 200, {"results": self.verdicts(body["source"], body["ops"])}
        if "dry_run" in path:
            return 200, {"results": [{"seq": op["seq"], "ctx": op["ctx"]} for op in body["ops"]]}
        with self.came:
            results = [self.apply(body["source"], operation) for operation in body["ops"]]
            self.came.notify_all()
        return 200, {"results": results}

    def apply(self, source: str, operation: Operation) -> dict[str, Any]:
        """Once, and only behind the one before it."""
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


def lifecycle_of(headers: Mapping[str, str]) -> dict[str, Any]:
    """The lifecycle header, read by a parser of its standard."""
    parsed = http_sf.parse(headers[LIFECYCLE_HEADER].encode(), tltype="dictionary")
    assert isinstance(parsed, dict)
    return {name: item[0] for name, item in parsed.items()}


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
