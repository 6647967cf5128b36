"""Sends operations to a proxy in the background, in order. Whoever records one never waits for it."""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvtether.connection import Answer, Connection, Verdict
from kvtether.ledger import Entry, Ledger

log = logging.getLogger("kvtether")

CAPACITY = 10_000
"""Operations that may wait to be sent."""

STOP_SECONDS = 1.0
"""Longest that an attempt under way is waited for when the thread is to end."""

MAX_BATCH = 256
"""Operations in one request."""

LOOK_SECONDS = 0.05
"""How often the thread looks for what may go while something else has to wait."""

NO_SUCH_CONTEXT = "no such context"
"""The proxy's reason where a context's first call has not come yet."""

_MAX_REFUSALS = 10


class Patience(NamedTuple):
    """Seconds between two attempts, at first and at most; each is twice the one before.

    `failing`: the server does not answer; `absent`: it takes no operations; `unknown`: it does not know the
    context yet.
    """

    failing: tuple[float, float] = (0.2, 30.0)
    absent: tuple[float, float] = (60.0, 600.0)
    unknown: tuple[float, float] = (0.1, 5.0)


PATIENCE = Patience()


class _Flush:
    """Somebody waits for everything recorded before to be gone; `sent` says whether it is."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.sent = False

    def end(self, sent: bool) -> None:
        self.sent = sent
        self.over.set()


class Exporter:
    """A bounded queue and the thread that empties it; the thread starts with the first operation.

    Operations of one context leave in order, and a context that began with another's list leaves after what
    that one did before. If nobody takes operations where `connect` leads, they are dropped, and for a while
    nothing is tried; if somebody does not answer, they wait, and what finds no room is not recorded. Both
    are said in one line of the log.
    """

    def __init__(
        self,
        connect: Callable[[], Connection | None],
        patience: Patience = PATIENCE,
        capacity: int = CAPACITY,
    ) -> None:
        """`connect` answers None as long as nobody knows where to; `capacity` operations wait at most."""
        self._capacity = capacity
        self._connect = connect
        self._patience = patience
        self.renew()

    def renew(self) -> None:
        """Begin with nothing to send: in a forked process the parent sends what is the parent's."""
        self._starting = threading.Lock()
        self._inbox: deque[Entry | _Flush] = deque()
        self._backlog: deque[Entry] = deque()
        self._flushes: list[_Flush] = []
        self._wake = threading.Event()
        self._idle = False
        self._urgent = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._absences = 0
        self._quiet_until = 0.0
        self._proven = False
        self._said = ""

    def take(self, entry: Entry) -> bool:
        """Queue an operation; False if there is no room. Never blocks."""
        if len(self._inbox) + len(self._backlog) >= self._capacity:
            if not self._said:
                self._say("operations come faster than they can be sent; some are not told")
            return False
        self._inbox.append(entry)
        if self._thread is None:
            self._start()
        elif self._idle:
            self._wake.set()
        return True

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvtether", daemon=True)
                self._thread, self._stopping = thread, False
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is ending: nobody will send this any more
                    log.debug("no thread can be started to send operations")

    def kick(self) -> None:
        """Send now what still waits for a call to ride on."""
        self._urgent = True
        self._wake.set()

    def found(self) -> None:
        """A proxy has just been seen: that nobody takes operations is over."""
        if self._absences:
            self._absences, self._quiet_until = 0, 0.0
            self._wake.set()

    def flush(self, seconds: float) -> bool:
        """Send everything recorded so far, and wait for it. False if that took longer, or an attempt failed.

        What was dropped because nobody takes it counts as gone.
        """
        if self._thread is None and self._inbox:
            self._start()
        thread = self._thread
        if thread is None or not thread.is_alive():
            return not self._inbox
        flush = _Flush()
        self._inbox.append(flush)
        self._wake.set()
        return flush.over.wait(seconds) and flush.sent

    def stop(self) -> None:
        """End the thread, whatever is left to send. It starts again with the next operation."""
        thread = self._thread
        if thread is not None:
            self._stopping = True
            self._wake.set()
            thread.join(STOP_SECONDS)

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed, so that the next one waits."""
        return time.monotonic() < self._quiet_until

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        connection: Connection | None = None
        pause: float | None = None
        while not self._stopping:
            # Whoever records wakes nobody while there is a moment at which this goes on by itself.
            self._idle = pause is None
            if not self._inbox or not self._idle:
                self._wake.wait(pause)
            self._idle = False
            self._wake.clear()
            try:
                connection = connection or self._connect()
                pause = self._send(connection)
            except Exception:
                log.exception("operations are lost")
                self._drop()
                pause = None
            if not self._backlog:
                self._end_flushes(True)
        if connection is not None:
            connection.close()
        self._thread = None

    def _collect(self) -> None:
        while self._inbox:
            entry = self._inbox[0]
            if isinstance(entry, _Flush):
                self._flushes.append(entry)
                self._quiet_until = self._quiet_until if self._absences else 0.0
            elif not entry.settled:
                self._backlog.append(entry)
            self._inbox.popleft()

    def _send(self, connection: Connection | None) -> float | None:
        """Send what is due. Answers after how many seconds there is more to do; None: when told."""
        while True:
            urgent, self._urgent = self._urgent, False
            self._collect()
            urgent = urgent or bool(self._flushes)
            self._backlog = deque(entry for entry in self._backlog if not entry.settled)
            if not self._backlog:
                return None
            now = time.monotonic()
            if connection is None or (now < self._quiet_until and self._absences):
                self._drop()
                return None
            if now < self._quiet_until:
                return self._quiet_until - now
            batch, due = self._batch(now, urgent)
            if not batch:
                return min(max(due - now, 0.001), LOOK_SECONDS)
            answer = connection.post(batch[0].source, [entry.operation for entry in batch])
            self._judge(batch, answer)
            self._urgent = self._urgent or urgent

    def _batch(self, now: float, urgent: bool) -> tuple[list[Entry], float]:
        """The first operations that may go, all of one context; else when the first may."""
        batch: list[Entry] = []
        earliest = now + self._patience.failing[1]
        waiting: set[Ledger] = set()
        for entry in self._backlog:
            if len(batch) == MAX_BATCH:
                break
            if batch:
                if entry.ledger is batch[0].ledger:
                    batch.append(entry)
                elif entry.operation.get("parent"):
                    break  # begins with what another context has by now: not to be overtaken by that one
                continue
            parent = entry.operation.get("parent")
            if entry.ledger in waiting or (parent and any(each.name == parent for each in waiting)):
                waiting.add(entry.ledger)
                continue
            due = max(0.0 if urgent else entry.due, entry.ledger.not_before)
            if due <= now:
                batch.append(entry)
            else:
                waiting.add(entry.ledger)
                earliest = min(earliest, due)
        return batch, earliest

    def _judge(self, batch: list[Entry], answer: Answer) -> None:
        now = time.monotonic()
        match answer.verdict:
            case Verdict.TAKEN:
                self._proven = True
                self._failures = self._absences = 0
                self._quiet_until = 0.0
                self._say("")
                self._settle(batch, answer, now)
            case Verdict.AGAIN:
                pause = max(_doubled(self._patience.failing, self._failures), answer.retry_after)
                self._failures += 1
                self._quiet_until = now + pause * random.uniform(0.75, 1.0)
                self._say(f"operations cannot be sent ({answer.detail}); the agent goes on without")
                self._end_flushes(False)
            case Verdict.REFUSED if self._proven:
                log.warning("operations were refused (%s); their context goes on without", answer.detail)
                batch[0].ledger.give_up()
            case Verdict.ABSENT | Verdict.REFUSED:
                self._quiet_until = now + _doubled(self._patience.absent, self._absences)
                self._absences += 1
                self._say(f"nobody takes operations ({answer.detail}); the agent goes on without")
                self._drop()

    def _settle(self, batch: list[Entry], answer: Answer, now: float) -> None:
        """Up to the first operation that may come again: those behind it would wait for it."""
        ledger = batch[0].ledger
        for entry, result in zip(batch, answer.results, strict=True):
            reason = result.get("reason", "")
            retry_after = result.get("retry_after", 0)
            if isinstance(retry_after, int | float) and retry_after > 0:
                ledger.not_before = now + retry_after
                return
            if reason == NO_SUCH_CONTEXT:
                ledger.refusals += 1
                if ledger.refusals > _MAX_REFUSALS:
                    ledger.give_up()
                else:
                    ledger.not_before = now + _doubled(self._patience.unknown, ledger.refusals)
                return
            if reason:
                log.debug("operation %s: %s", entry.operation, reason)
            ledger.refusals = 0
            ledger.settle(entry.source, entry.operation["seq"])

    def _end_flushes(self, sent: bool) -> None:
        for flush in self._flushes:
            flush.end(sent)
        self._flushes.clear()

    def _drop(self) -> None:
        for entry in self._backlog:
            if not entry.settled:
                entry.ledger.give_up()
        self._backlog.clear()

    def _say(self, problem: str) -> None:
        """One line when it begins, one when it is over."""
        if problem and not self._said:
            log.warning("%s", problem)
        elif self._said and not problem:
            log.info("operations are taken again")
        self._said = problem


def _doubled(bounds: tuple[float, float], times: int) -> float:
    return min(bounds[0] * 2.0 ** min(times, 20), bounds[1])
