"""File, environment and flags, in rising order; what is wrong is named; the schema says the same."""

import hashlib
from pathlib import Path

import jsonschema
import pytest
import yaml

from lifecycle.vocabulary import Mode
from proxy.auth import KeyScope
from proxy.config import Config, InvalidConfig, KeyConfig, api_key, json_schema
from proxy.config_source import load_config

SAMPLE = """
data: {host: 127.0.0.1, port: 0}
upstream:
  url: http://engine:8000/v1
  api_key_env: KVTETHER_ENGINE_KEY
models:
  - {path: /models/q, name: q}
cache:
  driver: lmcache_mp
  coordinator_url: http://cache:9300
mode: observe
modes:
  - {mode: enforce, model: q}
holdout: 0.05
api_keys:
  - {tenant: a, key_env: KVTETHER_KEY_OF_A, admin: true}
tenants:
  - {name: a, isolation: salt}
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "kvtether.yaml"
    path.write_text(SAMPLE)
    return path


def test_flags_stand_above_environment_above_file(sample: Path) -> None:
    assert load_config(sample, {}, {}).upstream.url == "http://engine:8000/v1"
    environment = {"KVTETHER_UPSTREAM__URL": "http://env:1", "KVTETHER_HOLDOUT": "0.5", "OTHER": "x"}
    config = load_config(sample, {}, environment)
    assert (config.upstream.url, config.holdout) == ("http://env:1", 0.5)
    assert config.upstream.api_key_env == "KVTETHER_ENGINE_KEY"
    config = load_config(sample, {"upstream.url": "http://flag:1", "mode": None}, environment)
    assert (config.upstream.url, config.mode) == ("http://flag:1", Mode.OBSERVE)


def test_the_environment_says_everything_that_the_file_can() -> None:
    environment = {
        "KVTETHER_LOG_URL": "memory:",
        "KVTETHER_DATA__PORT": "0",
        "KVTETHER_CACHE__L2_PINS": "true",
        "KVTETHER_MODE": "enforce",
        "KVTETHER_MODELS": '[{"path": "/models/q"}]',
        "KVTETHER_MODES": "[{mode: bypass, tenant: t}]",
    }
    config = load_config(None, None, environment)
    assert config.log_url == "memory:"
    assert config.data.port == 0
    assert config.cache.l2_pins
    assert config.mode is Mode.ENFORCE
    assert config.models[0].path == "/models/q"
    assert config.modes[0].tenant == "t"


def test_variables_that_hold_secrets_are_no_settings(sample: Path) -> None:
    environment = {"KVTETHER_ENGINE_KEY": "e", "KVTETHER_KEY_OF_A": "k", "KVTETHER_ADMIN_KEY": "k"}
    assert load_config(sample, {}, environment) == load_config(sample, {}, {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("upstream: {urll: x}", "urll"),
        ("nonsense: 1", "nonsense"),
        ("mode: often", "mode"),
        ("holdout: 2", "holdout"),
        ("data: {port: 70000}", "port"),
        ("mapping_workers: 0", "mapping_workers"),
        ("models: [{path: a, name: x}, {path: b, name: x}]", "models"),
        ("api_keys: [{tenant: t}]", "api_keys"),
        ("api_keys: [{tenant: t, key_env: A, key_sha256: b}]", "api_keys"),
        ("- a\n- b", "mapping"),
        ("{", "kvtether.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "kvtether.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=named):
        load_config(path, {}, {})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("KVTETHER_NONSENSE", "1", "nonsense"),
        ("KVTETHER_MODE__X", "1", "mode"),
        ("KVTETHER_MODELS", "[", "KVTETHER_MODELS"),
    ],
)
def test_a_wrong_variable_is_named(sample: Path, name: str, value: str, named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        load_config(sample, {}, {name: value})


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml", {}, {})


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "kvtether.yaml"
    path.write_text("")
    assert load_config(path, {}, {}) == Config()


def test_keys_come_from_the_environment_or_hashed() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    plain = api_key(KeyConfig(tenant="t", key_env="K"), {"K": "secret"})
    hashed = api_key(KeyConfig(tenant="t", key_sha256=digest, admin=True), {})
    assert plain.sha256() == hashed.sha256() == hashlib.sha256(b"secret").digest()
    assert plain.scopes == {KeyScope.CALL}
    assert hashed.scopes == {KeyScope.CALL, KeyScope.ADMIN}
    for wrong in (KeyConfig(tenant="bad", key_env="K"), KeyConfig(tenant="bad", key_sha256="00")):
        with pytest.raises(InvalidConfig, match="bad"):
            api_key(wrong, {})


def test_the_schema_accepts_what_we_accept_and_refuses_what_we_refuse() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(yaml.safe_load(SAMPLE))
    for wrong in ("upstream: {urll: x}", "mode: often", "holdout: 2", "models: [{name: x}]", "x: 1"):
        assert not validator.is_valid(yaml.safe_load(wrong)), wrong


TWO = [{"name": "a", "url": "http://a:8000"}, {"name": "b", "url": "http://b:8000", "api_key_env": "KEY_B"}]


def written(folder: Path, **sections: object) -> Path:
    path = folder / "several.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_one_engine_is_that_of_upstream(tmp_path: Path) -> None:
    cache = {"events_endpoint": "tcp://e:1", "replay_endpoint": "tcp://e:2"}
    path = written(tmp_path, upstream={"url": "http://e:8000", "api_key_env": "KEY"}, cache=cache)
    (only,) = load_config(path, {}, {}).backends
    assert (only.name, only.url, only.api_key_env) == ("", "http://e:8000", "KEY")
    assert (only.events_endpoint, only.replay_endpoint) == ("tcp://e:1", "tcp://e:2")


def test_several_engines_stand_in_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, upstream={"api_key_env": "KEY"}, upstreams=TWO)
    a, b = load_config(path, {}, {}).backends
    assert [(e.name, e.url, e.api_key_env) for e in (a, b)] == [
        ("a", "http://a:8000", "KEY"),
        ("b", "http://b:8000", "KEY_B"),
    ]


@pytest.mark.parametrize(
    ("sections", "overrides", "named"),
    [
        ({"upstream": {"url": "http://e:8000"}}, {}, "upstream.url"),
        ({}, {"upstream.url": "http://e:1"}, "upstream.url"),
        ({"cache": {"events_endpoint": "tcp://e:1"}}, {}, "cache.events_endpoint"),
        ({"cache": {"replay_endpoint": "tcp://e:1"}}, {}, "cache.replay_endpoint"),
    ],
)
def test_engines_are_named_in_one_place(
    tmp_path: Path, sections: dict[str, object], overrides: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"{named}: each of upstreams"):
        load_config(written(tmp_path, upstreams=TWO, **sections), overrides, {})


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "ä", "x" * 65])
def test_names_of_engines_fit_into_paths_and_labels(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfig, match="upstreams"):
        load_config(written(tmp_path, upstreams=[{"name": name, "url": "http://a"}]), {}, {})


def test_an_engine_stands_there_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="twice"):
        load_config(written(tmp_path, upstreams=[TWO[0], TWO[0]]), {}, {})
