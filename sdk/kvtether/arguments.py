"""What an agent says, checked where it says it: whatever leaves here the proxy takes."""

from operator import index
from typing import Literal, SupportsIndex, get_args

Span = tuple[SupportsIndex, SupportsIndex] | Literal["system", "tools"]
WaitKind = Literal["tool", "human", "subagent"]
Result = Literal["verified", "failed", "superseded"]

WAIT_KINDS: tuple[str, ...] = get_args(WaitKind)
RESULTS: tuple[str, ...] = get_args(Result)

_YEAR_SECONDS = 366 * 24 * 3600.0


def number(n: SupportsIndex) -> int:
    """How many messages. Raises `ValueError` below 0."""
    checked = index(n)
    if checked < 0:
        raise ValueError(f"{checked} is no number of messages")
    return checked


def checked_span(start: SupportsIndex, stop: SupportsIndex) -> tuple[int, int]:
    """`[start, stop)`, perhaps empty. Raises `ValueError` if it is no span."""
    span = index(start), index(stop)
    if not 0 <= span[0] <= span[1]:
        raise ValueError(f"[{span[0]}, {span[1]}) is no span")
    return span


def wire_span(span: Span) -> list[int] | str:
    """A span as it goes over the wire. Raises `ValueError` if it names nothing."""
    if not isinstance(span, str):
        start, stop = checked_span(*span)
        if start < stop:
            return [start, stop]
    elif span in ("system", "tools"):
        return span
    raise ValueError('a span is (start, stop), "system" or "tools"')


def checked_wait(kind: WaitKind) -> WaitKind:
    """What can be waited for. Raises `ValueError` for anything else."""
    if kind not in WAIT_KINDS:
        raise ValueError(f"one waits for one of {', '.join(WAIT_KINDS)}")
    return kind


def checked_result(result: Result) -> Result:
    """What work can come to. Raises `ValueError` for anything else."""
    if result not in RESULTS:
        raise ValueError(f"result is one of {', '.join(RESULTS)}")
    return result


def seconds(eta: float) -> float:
    """A wait in seconds: what is over already is 0, and no wait is longer than a year."""
    return min(max(0.0, float(eta)), _YEAR_SECONDS)


def lease(ttl: float) -> float:
    """A lease in seconds, a year at most. Raises `ValueError` if there is none."""
    if not ttl > 0:
        raise ValueError("ttl is more than 0 seconds")
    return min(float(ttl), _YEAR_SECONDS)
