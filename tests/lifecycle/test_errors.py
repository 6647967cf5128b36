"""One tree, drawn on its page; a conflict says what it expected and found."""

import inspect

import pytest

from lifecycle import errors

ALL = [e for _, e in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", ALL, ids=lambda e: e.__name__)
def test_every_error_is_of_the_tree_that_the_page_draws(error: type[Exception]) -> None:
    assert issubclass(error, errors.LifecycleError)
    assert error.__name__ in (errors.__doc__ or "")


def test_a_conflict_says_what_it_expected_and_found() -> None:
    conflict = errors.VersionConflict("ctx/a", 3, 5)
    assert (conflict.stream, conflict.expected, conflict.actual) == ("ctx/a", 3, 5)
    assert "'ctx/a' is at version 5, not 3" in str(conflict)
