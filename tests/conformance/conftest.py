"""Fixtures of every suite that runs against each event log adapter."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lifecycle.ports import EventLog
from tests.conformance.event_log_adapters import ADAPTERS, Adapter, Connect


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.name)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def connect(adapter: Adapter, tmp_path: Path) -> AsyncIterator[Connect]:
    opened: list[EventLog] = []

    async def one_more() -> EventLog:
        opened.append(await adapter.connect(tmp_path))
        return opened[-1]

    yield one_more
    for log in opened:
        await log.close()


@pytest.fixture
async def log(connect: Connect) -> EventLog:
    return await connect()
