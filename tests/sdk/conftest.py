"""A server for operations and a client of it, for one test."""

from collections.abc import Iterator

import pytest

from kvtether import Client
from tests.sdk.ops_server import OpsServer, ops_server


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTETHER_URL", "KVTETHER_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[OpsServer]:
    with ops_server() as server:
        yield server


@pytest.fixture
def client(server: OpsServer) -> Iterator[Client]:
    client = Client(f"{server.url}/v1", "key")
    yield client
    client.close()
