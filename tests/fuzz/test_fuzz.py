"""The fuzz targets, for a moment and with the same examples each time."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz import body_edit, http_requests, lifecycle_header

SHORT = settings(
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
    "each",
    [*body_edit.PROPERTIES, *http_requests.PROPERTIES, *lifecycle_header.PROPERTIES],
    ids=lambda each: each.__name__,
)
def test_a_target_finds_nothing(each: Callable[[], None]) -> None:
    SHORT(each)()
