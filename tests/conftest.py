"""Settings of every test: machines are slow and shared, so nothing is judged by a clock."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# One change is judged by the same examples each time it is judged; everybody else's runs look for new ones.
settings.register_profile("ci", settings.get_profile("shared-machine"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "shared-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: one that begins last keeps everybody waiting."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
