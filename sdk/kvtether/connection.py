"""One kept connection to a proxy's operations, and what an answer means for what was sent."""

import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvtether.ledger import Operation
from kvtether.names import OPS_PATH

SECONDS = 5.0
"""Bound of one request."""

_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_ABSENT = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405, 410, 421, 426, 501})
_AGAIN = frozenset({408, 425, 429})


class Verdict(Enum):
    """What became of a request."""

    TAKEN = "taken"
    ABSENT = "absent"
    """Nobody there takes operations, or none of ours."""
    AGAIN = "again"
    """Not now."""
    REFUSED = "refused"
    """These operations never."""


class Answer(NamedTuple):
    """`results` are one verdict an operation, if the request was taken. `retry_after` in seconds, 0 if not
    said. `detail` is for the log."""

    verdict: Verdict
    results: Sequence[Mapping[str, Any]] = ()
    retry_after: float = 0.0
    detail: str = ""


class Connection:
    """A connection that is opened when it is needed and kept as long as the other side keeps it. Not
    thread-safe."""

    def __init__(self, origin: str, api_key: str, seconds: float = SECONDS) -> None:
        """`origin` is a base URL without `/v1`. Raises `ValueError` if it is none."""
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{origin!r} is no http URL")
        self._prefix = parts.path.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        if parts.scheme == "https":
            self._peer: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=seconds, context=ssl.create_default_context()
            )
        else:
            self._peer = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)

    def post(self, source: str, operations: Sequence[Operation], *, dry_run: bool = False) -> Answer:
        """Send operations. Never raises."""
        body = json.dumps({"source": source, "ops": list(operations)}).encode()
        path = f"{self._prefix}{OPS_PATH}{'?dry_run=1' if dry_run else ''}"
        kept = self._peer.sock is not None
        try:
            try:
                response = self._exchange(path, body)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if not kept:
                    raise
                # A kept connection may have been given up by the other side; operations may come twice.
                self._peer.close()
                response = self._exchange(path, body)
            raw = response.read(_MAX_ANSWER_BYTES)
            if response.length:
                raise http.client.IncompleteRead(raw, response.length)
        except (OSError, http.client.HTTPException) as error:
            self._peer.close()
            return Answer(Verdict.AGAIN, detail=str(error) or type(error).__name__)
        if response.will_close:
            self._peer.close()
        return _read(response, raw, len(operations))

    def _exchange(self, path: str, body: bytes) -> http.client.HTTPResponse:
        self._peer.request("POST", path, body, self._headers)
        return self._peer.getresponse()

    def close(self) -> None:
        """Hang up."""
        self._peer.close()


def _read(response: http.client.HTTPResponse, raw: bytes, num_operations: int) -> Answer:
    status = response.status
    detail = f"HTTP {status}"
    if status == 200:
        results = _results(raw)
        if results is None or len(results) != num_operations:
            return Answer(Verdict.ABSENT, detail="its answer is not a proxy's")
        return Answer(Verdict.TAKEN, results)
    if status in _ABSENT:
        return Answer(Verdict.ABSENT, detail=detail)
    if status in _AGAIN or status >= 500:
        return Answer(Verdict.AGAIN, retry_after=_seconds(response.getheader("retry-after")), detail=detail)
    return Answer(Verdict.REFUSED, detail=detail)


def _results(raw: bytes) -> Sequence[Mapping[str, Any]] | None:
    try:
        results = json.loads(raw)["results"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if isinstance(results, list) and all(isinstance(each, dict) for each in results):
        return results
    return None


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 0), 0.0), 60.0)
    except ValueError:
        return 0.0
