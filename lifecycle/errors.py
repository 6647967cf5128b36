"""Errors of the domain. A class exists only where a caller acts differently on it.

LifecycleError
├── InvalidObservation   the input cannot be true; nothing was recorded
├── UnknownContext       the context is not this tenant's, or does not exist
├── VersionConflict      somebody else appended first; read again and decide again
├── LogUnavailable       the log cannot take or give events now; calls go on untracked
│   └── Deposed          another proxy owns the log: what only the owner may say is refused
├── CorruptLog           what was read back cannot be decoded; reclaim stops
└── ReadModelsUnavailable  the read models' database cannot take or give rows now; nothing else suffers
"""


class LifecycleError(Exception):
    """Root of the domain's errors."""


class InvalidObservation(LifecycleError):
    """The observation contradicts the context's state or its own contract."""


class UnknownContext(LifecycleError):
    """No such context for this tenant."""


class VersionConflict(LifecycleError):
    """The stream moved on: the expected version is not its last one."""

    def __init__(self, stream: str, expected: int, actual: int) -> None:
        super().__init__(f"stream {stream!r} is at version {actual}, not {expected}")
        self.stream = stream
        self.expected = expected
        self.actual = actual


class LogUnavailable(LifecycleError):
    """The event log refused or lost the request; nothing of the batch was recorded."""


class Deposed(LogUnavailable):
    """Another process on this log owns it since: it was not recorded, and is not this one's to ask for."""


class CorruptLog(LifecycleError):
    """The log holds something this version cannot decode."""


class ReadModelsUnavailable(LifecycleError):
    """The database of the read models cannot be used now, or tells of another log; the message says which."""
