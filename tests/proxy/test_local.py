"""The local deployment's configuration follows its stack."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lifecycle.vocabulary import Mode
from proxy.local import local_config


def test_the_proxy_points_at_the_stack(tmp_path: Path) -> None:
    stack: Any = SimpleNamespace(
        upstream_url="http://127.0.0.1:1",
        coordinator_url="http://127.0.0.1:2",
        events_endpoint="tcp://127.0.0.1:3",
        replay_endpoint="tcp://127.0.0.1:4",
        model_path="/models/tiny",
        options=SimpleNamespace(model_name="tiny"),
    )
    config = local_config(stack, tmp_path)
    assert config.mode is Mode.ENFORCE
    assert config.upstream.url == "http://127.0.0.1:1"
    assert (config.cache.driver, config.cache.coordinator_url) == ("lmcache_mp", "http://127.0.0.1:2")
    assert config.cache.events_endpoint == "tcp://127.0.0.1:3"
    assert (config.models[0].name, config.models[0].path) == ("tiny", "/models/tiny")
    assert str(tmp_path) in config.log_url
    assert local_config(stack, tmp_path, Mode.OBSERVE).mode is Mode.OBSERVE
