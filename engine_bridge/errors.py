"""Errors of the bridge to engines and caches. A class exists only where a caller acts differently on it.

BridgeError
├── CacheUnavailable     the cache's control interface cannot be reached; the directive may be tried again
├── MalformedTrace       a recorded trace says what cannot be; whoever made it has to look at the line
├── TemplateMismatch     our tokens are not the engine's; stop mapping under this fingerprint
└── Unmappable           this call's tokens cannot be known; forward it, reclaim nothing of it
    └── RejectedByEngine the engine answers such a request with an error; no KV comes of it
"""

from pathlib import Path


class BridgeError(Exception):
    """Root of the bridge's errors."""


class CacheUnavailable(BridgeError):
    """The cache did not answer, or answered with a failure of its own."""


class MalformedTrace(BridgeError):
    """A line of a trace is not what the format allows, or contradicts the lines before it."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class TemplateMismatch(BridgeError):
    """The engine's token ids differ from ours for the same conversation."""

    def __init__(self, probe: str, position: int, ours: int, theirs: int) -> None:
        super().__init__(
            f"probe {probe!r}: ids differ at token {position} (we have {ours} tokens, the engine {theirs})"
        )
        self.probe = probe
        self.position = position
        self.ours = ours
        self.theirs = theirs


class Unmappable(BridgeError):
    """The tokens of this call cannot be computed; `reason` says why, in words for an operator."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Unmappable"], tuple[str]]:
        return type(self), (self.reason,)


class RejectedByEngine(Unmappable):
    """The request breaks a rule of the engine's request model or of its chat template."""
