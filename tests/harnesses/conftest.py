import pytest

from harnesses.model_server import scripted_model


@pytest.fixture
async def model(tmp_path):
    async with scripted_model(tmp_path / "requests.jsonl") as served:
        yield served
