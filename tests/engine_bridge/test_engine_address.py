"""The forms in which people write where an engine is."""

import httpx
import pytest

from engine_bridge.engine_address import EngineAddress


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_every_form_of_a_base_url_is_the_same_engine(suffix: str) -> None:
    assert EngineAddress(f"http://h:8000{suffix}").base == "http://h:8000"
    assert EngineAddress(f" http://h/x{suffix} ").base == "http://h/x"


def test_engines_on_sockets_have_addresses_of_their_own_that_clients_take() -> None:
    sockets = ["unix:/run/a/b.sock", "unix:/run/a-b.sock", "unix:/run/A/b.sock", f"unix:/{'x' * 90}/b.sock"]
    addresses = [EngineAddress(url) for url in sockets]
    assert len({address.base for address in addresses}) == len(sockets)
    for address in addresses:
        assert list(address.mounts) == [address.base]
        assert httpx.URL(f"{address.base}/v1/models").path == "/v1/models"
    assert EngineAddress(" unix:///run/a/b.sock ").base == addresses[0].base
    assert not EngineAddress("http://h").mounts


def test_only_a_key_of_the_engines_own_is_sent() -> None:
    assert EngineAddress("http://h").headers == {}
    assert EngineAddress("http://h", key="k").headers == {"authorization": "Bearer k"}


def test_one_alone_is_not_named() -> None:
    assert EngineAddress("http://h").named("is away") == "is away"
    assert EngineAddress("http://h", "a").named("is away") == "engine a: is away"
