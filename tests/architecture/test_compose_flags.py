"""Every flag and setting in the compose file exists in the installed engine."""

import json
import re
import subprocess

import pytest

from engine_bridge.stack.environment import EngineEnvironment
from tests.architecture.deployment import compose, flags

pytestmark = pytest.mark.e2e

_READ_SETTINGS = """
import json, sys
from lmcache.integration.vllm.vllm_multi_process_adapter import ExtraConfigDefault
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
import lmcache.integration.vllm.lmcache_mp_connector as connector
import vllm.envs
from vllm.config.kv_events import KVEventsConfig
adapter, events = json.loads(sys.argv[1])
kind = get_l2_adapter_config_class(adapter["type"])
config = kind.from_dict(adapter)
eviction = kind._parse_eviction_config(adapter)
KVEventsConfig(**events)
print(json.dumps({
    "host": config.host, "capacity": config.max_capacity_gb, "policy": eviction.eviction_policy,
    "watermark": eviction.trigger_watermark, "connector": open(connector.__file__).read(),
    "names": [m.name for m in ExtraConfigDefault], "variables": list(vllm.envs.environment_variables),
}))
"""


@pytest.fixture(scope="module")
def services():
    return compose()["services"]


def engine_help(*words: str) -> set[str]:
    environment = EngineEnvironment()
    environment.require()
    done = subprocess.run(
        [environment.command(words[0]), *words[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "COLUMNS": "200"},
    )
    return set(re.findall(r"--[a-z0-9][a-z0-9-]*", done.stdout))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm", ("vllm", "serve", "--help=all")),
        ("lmcache", ("lmcache", "server", "--help")),
        ("coordinator", ("lmcache", "coordinator", "--help")),
    ],
)
def test_flags_exist(services, name, words):
    assert set(flags(services[name])) <= engine_help(*words)


def test_settings_inside_flags_are_read(services):
    environment = EngineEnvironment()
    environment.require()
    adapter = json.loads(flags(services["lmcache"])["--l2-adapter"])
    events = json.loads(flags(services["vllm"])["--kv-events-config"])
    done = subprocess.run(
        [environment.python, "-c", _READ_SETTINGS, json.dumps([adapter, events])],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["host"] == "redis"
    assert found["capacity"] == adapter["max_capacity_gb"]
    assert found["policy"] == adapter["eviction"]["eviction_policy"]
    assert found["watermark"] == adapter["eviction"]["trigger_watermark"]
    connector = json.loads(flags(services["vllm"])["--kv-transfer-config"])["kv_connector_extra_config"]
    for setting in connector:
        known = setting.removeprefix("lmcache.mp.") in found["names"] or setting in found["connector"]
        assert known, setting
    assert {n for n in services["vllm"]["environment"] if n.startswith("VLLM_")} <= set(found["variables"])
