"""Shared links and timers: everything that ends later. Pure: time comes in with each call."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

NANOSECONDS = 1_000_000_000

Action: TypeAlias = Callable[[int], None]
"""What happens at the end, called with the time in nanoseconds."""


class Agenda:
    """Actions to come, by time; those of one time in the order they were put in."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Action]] = []
        self._count = 0

    def at(self, at_ns: int, action: Action) -> None:
        heapq.heappush(self._heap, (at_ns, self._count, action))
        self._count += 1

    def next_ns(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def run(self, now_ns: int) -> None:
        """Run everything due, also what becomes due meanwhile."""
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, action = heapq.heappop(self._heap)
            action(at_ns)


class Link:
    """A link whose bandwidth is shared evenly by the transfers on it; each has a fixed latency before.

    Works in units of `bandwidth` per nanosecond, of which a byte is 10^9: `_served` is what every transfer
    got that was there from the beginning, so a transfer ends when it reaches its own mark.
    """

    def __init__(self, agenda: Agenda, bandwidth: int, latency_ns: int = 0) -> None:
        if bandwidth <= 0:
            raise ValueError("a link needs a bandwidth")
        self._agenda = agenda
        self._bandwidth = bandwidth
        self._latency_ns = latency_ns
        self._marks: list[tuple[int, int, Action]] = []
        self._count = 0
        self._served = 0
        self._now_ns = 0
        self.bytes_moved = 0

    @property
    def num_active(self) -> int:
        return len(self._marks)

    def start(self, size_bytes: int, now_ns: int, done: Action) -> None:
        """Begin a transfer; `done` runs at its end."""
        self.bytes_moved += size_bytes
        self._agenda.at(now_ns + self._latency_ns, lambda at_ns: self._enter(size_bytes, at_ns, done))

    def _enter(self, size_bytes: int, now_ns: int, done: Action) -> None:
        self._serve(now_ns)
        heapq.heappush(self._marks, (self._served + size_bytes * NANOSECONDS, self._count, done))
        self._count += 1

    def _serve(self, now_ns: int) -> None:
        if self._marks:
            self._served += (now_ns - self._now_ns) * self._bandwidth // len(self._marks)
        self._now_ns = now_ns

    def next_ns(self) -> int | None:
        """When the next transfer ends if none joins before."""
        if not self._marks:
            return None
        left = max(0, self._marks[0][0] - self._served)
        return self._now_ns + -(-left * len(self._marks) // self._bandwidth)

    def run(self, now_ns: int) -> None:
        """Serve until `now_ns`, which must not lie behind `next_ns()`, and end what is done."""
        self._serve(now_ns)
        while self._marks and self._marks[0][0] <= self._served:
            heapq.heappop(self._marks)[2](now_ns)
