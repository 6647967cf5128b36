"""Which log a URL names."""

import secrets
from pathlib import Path

import pytest

from lifecycle.core.events import ListGrown
from lifecycle.store.opening import open_log
from tests.lifecycle.store.redis_process import place_in_shared_redis


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_the_log_and_its_settings_are_found_again(tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path}/log.db" if kind == "sqlite" else await place_in_shared_redis(tmp_path)
    kept = []
    for version in range(2):
        opened = await open_log(url)
        await opened.event_log.append("ctx/a", [ListGrown(at_ns=1, num_new=1)], version)
        kept.append(await opened.settings.get_or_create("digest_secret", lambda: secrets.token_bytes(32)))
        assert opened.place.startswith(f"{kind}://")
        await opened.event_log.close()
    assert kept[0] == kept[1]


@pytest.mark.parametrize("url", ["postgresql://host/kv", "sqlite://", "redis://"])
async def test_other_urls_name_no_log(url: str) -> None:
    with pytest.raises(ValueError):
        await open_log(url)
