"""The way to one proxy: where it is, whether it is there, and what travels to it."""

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from urllib.parse import urlsplit

from kvtether.connection import Connection
from kvtether.exporter import Exporter
from kvtether.ledger import Entry, Ledger, Operation
from kvtether.names import CALL_HEADER, CONTEXT_HEADER, LIFECYCLE_ERROR_HEADER

log = logging.getLogger("kvtether")

FLUSH_SECONDS = 2.0
"""Longest that the end of the process waits for what is still to be sent."""

LAST_SECONDS = 0.2
"""The same, if the attempt before the end failed."""

ASK_SECONDS = 1.0
"""Longest that a question waits for what goes before it, and as long again for its answer."""

_MAX_CALLS_KEPT = 1024


class Client:
    """The way to one proxy, shared by any number of contexts, threads and tasks.

    Without `base_url` it is `KVTETHER_URL`, else `OPENAI_BASE_URL`, else the first server whose answer to a
    hooked client says that it is a proxy. `api_key` likewise: `KVTETHER_API_KEY`, else `OPENAI_API_KEY`.
    """

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        """Raises `ValueError` if `base_url` is no http URL."""
        self.present = False
        """Whether the last call that was seen to be answered there was answered by a proxy."""
        self._key = api_key or os.environ.get("KVTETHER_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
        self.origin = origin_of(base_url) if base_url else ""
        if base_url and not self.origin:
            raise ValueError(f"{base_url!r} is no http URL")
        if not base_url:
            found = os.environ.get("KVTETHER_URL") or os.environ.get("OPENAI_BASE_URL") or ""
            self.origin = origin_of(found)
            if found and not self.origin:
                log.warning("%r is no http URL; nobody is told anything", found)
        self._lock = threading.Lock()
        self._calls: dict[str, tuple[weakref.ref[Ledger], str, int]] = {}
        self._exporter = Exporter(self._connect)
        _clients.add(self)

    def _connect(self) -> Connection | None:
        return Connection(self.origin, self._key) if self.origin else None

    def queue(self, entry: Entry) -> bool:
        """Take an operation on; False if there is no room. Never blocks."""
        return self._exporter.take(entry)

    def kick(self) -> None:
        """A call left that the operations before it could not ride on: they are sent now."""
        self._exporter.kick()

    def rides(self, call_id: str, ledger: Ledger, source: str, seq: int) -> None:
        """Operations up to `seq` ride on a call; its answer will show whether they arrived."""
        with self._lock:
            while len(self._calls) >= _MAX_CALLS_KEPT:
                del self._calls[next(iter(self._calls))]
            self._calls[call_id] = (weakref.ref(ledger), source, seq)

    def serves(self, url: str) -> bool:
        """Whether a request to `url` goes to this client's proxy, as far as is known."""
        return not self.origin or url.startswith(f"{self.origin}/")

    def saw(self, url: str, headers: Mapping[str, str], authorization: str = "") -> None:
        """Learn from the answer to a call whether a proxy is there, and what it took in.

        `headers` are the answer's, in lower case or in a mapping that does not mind; `authorization` is the
        request's, for a client that was not told a key.
        """
        there = headers.get(CONTEXT_HEADER) is not None
        if there and not self.origin:
            self._key = self._key or authorization.removeprefix("Bearer ")
            self.origin = origin_of(url)
        if not self.origin or not self.serves(url):
            return
        self.present = there
        with self._lock:
            rode = self._calls.pop(headers.get(CALL_HEADER, ""), None)
        if not there:
            return
        ledger = rode[0]() if rode is not None else None
        if rode is not None and ledger is not None:
            if LIFECYCLE_ERROR_HEADER not in headers:
                ledger.settle(rode[1], rode[2])
            ledger.not_before = 0.0
        self._exporter.found()

    def cost(self, operation: Operation) -> int | None:
        """Tokens that must be prefilled again if an edit were made now; None if that is not known.

        Asks the proxy, and waits for it two seconds at most.
        """
        if not self.origin or self._exporter.failing or not self.flush(ASK_SECONDS):
            return None
        connection = Connection(self.origin, self._key, ASK_SECONDS)
        answer = connection.post("dry-run", [operation], dry_run=True)
        connection.close()
        cost = answer.results[0].get("prefill_tokens") if answer.results else None
        return cost if isinstance(cost, int) else None

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Send every operation recorded so far, and wait for it.

        False if it took longer or an attempt failed: what is left is sent later. What nobody takes counts as
        gone.
        """
        return self._exporter.flush(seconds)

    async def aflush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """`flush` for coroutines."""
        return await asyncio.to_thread(self.flush, seconds)

    def close(self) -> None:
        """Flush, and end the thread. Not needed at the end of a process; a later operation starts it anew."""
        self._at_exit()
        self._exporter.stop()

    def _at_exit(self) -> None:
        self.flush(LAST_SECONDS if self._exporter.failing else FLUSH_SECONDS)

    def _in_child(self) -> None:
        self._lock = threading.Lock()
        self._calls.clear()
        self._exporter.renew()


def origin_of(url: str) -> str:
    """The base of a URL, without what begins with the API's version; empty if it is no http URL."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1)
    except ValueError:
        return ""
    if not valid:
        return ""
    path = parts.path
    cut = path.find("/v1")
    return f"{parts.scheme}://{parts.netloc}{path[:cut] if cut >= 0 else path.rstrip('/')}"


def default_client() -> Client:
    """The client of contexts that name none: one a process."""
    global _default
    with _making:
        if _default is None:
            _default = Client()
        return _default


_default: Client | None = None
_making = threading.Lock()
_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _at_exit() -> None:
    for client in list(_clients):
        client._at_exit()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    for client in list(_clients):
        client._in_child()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
