"""Reading a deployment's flags. The whole test runs against a real deployment elsewhere."""

import pytest

from engine_bridge.drivers.lmcache_client import Found, Placement
from engine_bridge.drivers.lmcache_keys import ObjectKey
from engine_bridge.drivers.lmcache_selftest import bytes_per_token, saves_decode, server_flags

SOUND = {
    "mp": {"engine_type": "default"},
    "coordinator": {"event_reporting": True, "event_flush_interval": 0.2},
}


def test_a_sound_server_has_no_problem() -> None:
    assert server_flags(SOUND) == ([], 0.2)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"coordinator": {"event_reporting": False}}, "--coordinator-event-reporting"),
        ({"coordinator": None}, "--coordinator-event-reporting"),
        ({"mp": {"engine_type": "blend"}}, "--engine-type"),
    ],
)
def test_each_problem_names_the_flag_that_fixes_it(change: dict[str, object], flag: str) -> None:
    problems, _ = server_flags(SOUND | change)
    assert len(problems) == 1
    assert flag in problems[0]


@pytest.mark.parametrize(
    ("extra", "expected"), [({"lmcache.mp.save_decode_cache": True}, True), ({}, False), (None, None)]
)
def test_decode_saving_is_read_where_the_engine_shows_it(extra: object, expected: bool | None) -> None:
    info = {"vllm_config": {"kv_transfer_config": {"kv_connector_extra_config": extra}}}
    assert saves_decode(info) is expected
    assert saves_decode({}) is None


def test_bytes_per_token_counts_ranks_and_not_tiers() -> None:
    both = (Placement("a", "l1", "dram", 640), Placement("a", "l2", "fs", 640))
    found = [Found(ObjectKey("00" * 32, "m", rank), both) for rank in (0, 1)]
    assert bytes_per_token(found, num_chunks=1, chunk_size=64) == 20
    assert bytes_per_token([], num_chunks=0, chunk_size=64) == 0
