"""Reading a deployment's flags, and telling engines apart; real deployments are tested elsewhere."""

from collections.abc import Callable

import pytest

from engine_bridge.drivers.lmcache_client import Found, LmcacheClient, Placement
from engine_bridge.drivers.lmcache_keys import ObjectKey
from engine_bridge.drivers.lmcache_selftest import (
    Findings,
    StartupTest,
    Tokenize,
    bytes_per_token,
    saves_decode,
    server_flags,
)
from tests.engine_bridge.drivers.toy_fleet import ToyFleet, ToyNode, toy_fleet

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


async def findings(fleet: ToyFleet, tokenize: Tokenize = lambda text: None) -> Findings:
    client = LmcacheClient(fleet.url)
    try:
        return await StartupTest(client, fleet.addresses, tokenize=tokenize).run()
    finally:
        await client.close()


async def test_every_engine_is_proven_with_its_own_key_and_on_its_own_server() -> None:
    async with toy_fleet("a", "b") as fleet:
        found = await findings(fleet, lambda text: [ord(letter) for letter in text])
        assert (found.problems, found.unreached, found.admission_problem) == ([], {}, "")
        assert found.stores_on == {"a": {"cache-a"}, "b": {"cache-b"}}
        assert found.key_models == {"m": "/models/m"}
        assert [node.keys_seen for node in fleet.nodes] == [{"Bearer key of a"}, {"Bearer key of b"}]


async def test_an_engine_that_is_away_is_named_and_the_others_are_proven() -> None:
    async with toy_fleet("a", "b") as fleet:
        fleet.nodes[0].url = "http://127.0.0.1:9"
        found = await findings(fleet)
        assert found.problems == []
        assert found.unreached["a"].startswith("engine a: GET http://127.0.0.1:9/version")
        assert found.stores_on.keys() == {"b"}
        fleet.nodes[1].url = "http://127.0.0.1:9"
        found = await findings(fleet)
        assert [problem[:9] for problem in found.problems] == ["engine a:", "engine b:"]


def another_model(node: ToyNode) -> None:
    node.root = "/elsewhere/m"


def another_version(node: ToyNode) -> None:
    node.version = "0.1"


def stores_elsewhere(node: ToyNode) -> None:
    node.stores = False


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (another_model, "with one --model value"),
        (another_version, "is vLLM 0.1"),
        (stores_elsewhere, "LMCacheMPConnector points at these servers"),
    ],
)
async def test_the_one_engine_that_is_not_in_order_is_named(
    spoil: Callable[[ToyNode], None], said: str
) -> None:
    async with toy_fleet("a", "b", "c") as fleet:
        spoil(fleet.nodes[1])
        (problem,) = (await findings(fleet)).problems
        assert problem.startswith("engine b: ")
        assert said in problem


async def test_another_tokenizer_than_one_engines_is_named() -> None:
    async with toy_fleet("a", "b") as fleet:
        found = await findings(fleet, lambda text: [1])
        assert [problem[:9] for problem in found.problems] == ["engine a:", "engine b:"]
        assert all("tokenizer" in problem for problem in found.problems)


async def test_the_hint_counts_only_if_every_engine_honours_it() -> None:
    async with toy_fleet("a", "b") as fleet:
        fleet.nodes[0].honours_limit = False
        found = await findings(fleet)
        assert found.problems == []
        assert found.admission_problem.startswith("engine a: ")
