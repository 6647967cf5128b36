"""The machine's clock and randomness, as the domain's ports want them. The only place that reads either."""

import secrets
import time


class SystemClock:
    """Wall clock."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()


class RandomIds:
    """Unguessable ids: they name contexts in URLs."""

    def new(self, prefix: str) -> str:
        """A fresh id of 96 random bits behind the prefix."""
        return f"{prefix}_{secrets.token_urlsafe(12)}"
