"""The proxy's tests run on the event loop that it is served with."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.proxy.strict_loop import StrictLoop
from tests.proxy.torture import Torture, standing


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": StrictLoop}


@pytest.fixture(scope="session")
def torture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torture]:
    """One proxy for all torture: what a test does to it must not show in the next."""
    with standing(tmp_path_factory.mktemp("torture")) as bench:
        yield bench
