"""Rewrite every golden file: `python -m tests.golden`, or `make golden`. The diff is reviewed like code."""

from tests.lifecycle import golden_snapshots
from tests.lifecycle.core import golden_events, golden_traces


def main() -> None:
    """Rewrite them all."""
    golden_events.main()
    golden_traces.main()
    golden_snapshots.main()


if __name__ == "__main__":
    main()
