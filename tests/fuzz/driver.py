"""Runs a property for as long as it is told to: `python -m tests.fuzz.<target> --seconds 60`."""

import argparse
import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings

EXAMPLES_A_ROUND = 2_000


def run_for(properties: list[Callable[[], None]]) -> None:
    """Give each property its share of the time, round by round, with new examples each time. A failure is
    made small and raised."""
    parser = argparse.ArgumentParser(description="Look for inputs that break a property.")
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    unbounded = settings(
        max_examples=EXAMPLES_A_ROUND,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    targets = [unbounded(each) for each in properties]
    end = time.monotonic() + seconds
    num_rounds = 0
    while time.monotonic() < end:
        for target in targets:
            target()
        num_rounds += 1
    print(f"{num_rounds * EXAMPLES_A_ROUND} examples a property, {len(properties)} properties: nothing found")
