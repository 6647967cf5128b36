"""The operations of one context: numbered, in order, and what is known of their way to the proxy."""

import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

Operation = dict[str, Any]
"""An operation as it goes over the wire: `op`, `seq`, `ctx` and its own fields."""


class Entry(NamedTuple):
    """An operation on its way. `due`, on the monotonic clock, is when it goes by itself."""

    ledger: "Ledger"
    source: str
    operation: Operation
    due: float

    @property
    def settled(self) -> bool:
        """Whether it need not be sent any more."""
        return self.source != self.ledger.source or self.operation["seq"] <= self.ledger.settled


class Ledger:
    """Numbers operations of one context from 1, without gaps, under a source of its own.

    `settled` is the last operation that need not be sent any more. While a ledger is `lost` it records
    nothing: something could not be kept, so that spans would be counted from a list that the proxy does not
    know. The next call heals it, for its list shows every edit. `not_before` and `refusals` belong to whoever
    sends. Thread-safe.
    """

    def __init__(self, name: str, queue: Callable[[Entry], bool]) -> None:
        """`queue` takes an operation, or answers False if there is no room for it."""
        self.name = name
        self.lost = False
        self._queue = queue
        self._renumber()
        _ledgers.add(self)

    def _renumber(self) -> None:
        self.lock = threading.RLock()
        self.source = f"{_process}-{next(_numbers)}"
        self.last = 0
        self.settled = 0
        self.not_before = 0.0
        self.refusals = 0
        self._unsettled: deque[Operation] = deque()

    def record(self, operation: Operation, linger: float) -> None:
        """Give the next number and queue; `linger` seconds it may wait for a call to ride on."""
        with self.lock:
            if self.lost:
                return
            operation["seq"] = self.last + 1
            if not self._queue(Entry(self, self.source, operation, time.monotonic() + linger)):
                self.lost = True
                return
            self.last += 1
            self._unsettled.append(operation)

    def before_call(self) -> tuple[str, int, list[Operation]]:
        """Source, last number, and the operations that the proxy may not have yet, for a call that is about
        to leave. From here on nothing counts as lost."""
        with self.lock:
            self.lost = False
            return self.source, self.last, list(self._unsettled)

    def settle(self, source: str, seq: int) -> None:
        """Operations of `source` up to `seq` are where they belong, or were refused for good."""
        with self.lock:
            if source != self.source:
                return
            self.settled = max(self.settled, seq)
            while self._unsettled and self._unsettled[0]["seq"] <= seq:
                self._unsettled.popleft()

    @property
    def opening(self) -> bool:
        """Whether the first operation is on its way still."""
        return bool(self._unsettled) and not self.settled

    def give_up(self) -> None:
        """Forget what is on its way. The numbering begins anew, so that no gap is waited for."""
        with self.lock:
            lock, used = self.lock, self.last > self.settled
            self._renumber()
            self.lock, self.lost = lock, self.lost or used

    def _in_child(self) -> None:
        """A forked process numbers under a source of its own, and tells its list by its next call."""
        used = self.last > 0
        self._renumber()
        self.lost = used


_process = secrets.token_hex(6)
_numbers = count(1)
_ledgers: "weakref.WeakSet[Ledger]" = weakref.WeakSet()


def _after_fork() -> None:
    global _process
    _process = secrets.token_hex(6)
    for ledger in list(_ledgers):
        ledger._in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
