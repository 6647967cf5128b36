"""The event loop that the proxy is served with, as strict as the rest of the tests."""

import warnings

import uvloop


class StrictLoop(uvloop.Loop):
    """Closing it raises `ResourceWarning` where something was left open.

    uvloop says so by a warning in the middle of its work: where that is an error it leaves the thing as it is
    and then waits for its end, for ever.
    """

    def close(self) -> None:
        """Close the loop and what is still open on it, and say what that was."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            super().close()
        if said:
            raise ResourceWarning("; ".join(str(warning.message) for warning in said))
