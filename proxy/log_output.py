"""What this process writes about itself: one line an event to standard error, JSON or for people to read.

Lines carry the id of the request they belong to. A warning that repeats is written a few times, then counted.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from proxy.request_record import current_request

BURST = 5
WINDOW_SECONDS = 10.0
"""Of one warning or error, so many lines are written in so many seconds; the next line says how many were
left out."""

MAX_EVENTS = 512
"""Different warnings that are told apart."""

_LEVELS = logging.getLevelNamesMapping()


def configure_logging(level: str = "info", form: str = "auto") -> None:
    """From `level` on, as `form`: `json`, `console`, or `auto` for what suits standard error.

    May be called again, also while lines are written.
    """
    for_people = form == "console" or (form == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            add_request_id,
            RepeatLimit(),
            *_renderers(for_people),
        ],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    set_level(level)
    root = logging.getLogger()
    root.handlers[:] = [_Handler()]
    root.setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Write from this level on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level.upper()]))


class RepeatLimit:
    """A processor. `seconds` is a clock that never goes back."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._seen: dict[str, _Seen] = {}

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        """Pass the line, or raise `DropEvent`."""
        if _LEVELS.get(str(event.get("level", "")).upper(), 0) < logging.WARNING:
            return event
        now, what = self._seconds(), str(event.get("event"))
        seen = self._seen.get(what)
        if seen is None:
            if len(self._seen) >= MAX_EVENTS:
                self._seen.clear()
            seen = self._seen[what] = _Seen(now)
        if now - seen.since >= WINDOW_SECONDS:
            if seen.left_out:
                event["left_out"] = seen.left_out
            seen.since, seen.num, seen.left_out = now, 0, 0
        seen.num += 1
        if seen.num > BURST:
            seen.left_out += 1
            raise structlog.DropEvent
        return event


class _Seen(msgspec.Struct):
    since: float
    num: int = 0
    left_out: int = 0


class _Handler(logging.Handler):
    """Lines of the standard library's logging, ours and others', come out like all the rest."""

    def emit(self, record: logging.LogRecord) -> None:
        say = structlog.get_logger()
        say.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


def add_request_id(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """A processor: the line belongs to the request that is under way, if one is."""
    request = current_request()
    if request is not None and request.id:
        event.setdefault("request_id", request.id)
    return event


def _renderers(for_people: bool) -> list[Processor]:
    if for_people:
        # Others show what the frames held, where rich is installed: prompts, and headers with keys.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, _json]


def _json(logger: WrappedLogger, name: str, event: MutableMapping[str, Any]) -> str:
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    try:
        return msgspec.json.encode({**first, **event}, enc_hook=repr).decode()
    except UnicodeEncodeError:
        # Half a surrogate pair, from a name in some client's JSON: escaped as it came.
        return json.dumps({**first, **event}, default=repr)
