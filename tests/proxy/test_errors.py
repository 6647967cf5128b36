"""One tree: what we refuse, what the engine failed at, and the client that went."""

import inspect

import pytest

from proxy import errors
from proxy.problems import status_and_kind

ALL = [e for _, e in inspect.getmembers(errors, inspect.isclass)]
LEAVES = [e for e in ALL if not e.__subclasses__()]


@pytest.mark.parametrize("error", ALL, ids=lambda e: e.__name__)
def test_every_error_is_of_the_tree_that_the_page_draws(error: type[Exception]) -> None:
    assert issubclass(error, errors.ProxyError)
    assert error.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("error", [e for e in LEAVES if e is not errors.ClientGone], ids=lambda e: e.__name__)
def test_every_error_that_a_client_sees_has_a_status_of_its_own(error: type[Exception]) -> None:
    assert status_and_kind(error("x"))[1] != "internal"
