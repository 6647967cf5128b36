"""When a chunk counts as gone, what covers an L1 copy, who can reach a copy, and what nobody shows."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.drivers.lmcache_client import Found, Instance, LmcacheClient, Placement
from engine_bridge.drivers.lmcache_keys import Layout, ObjectKey
from engine_bridge.drivers.lmcache_reclaim import (
    LOOKS_NEEDED,
    ChunkRemover,
    Progress,
    Target,
    by_chunk,
    is_covered,
    reachable_from,
    tiers_of,
)
from lifecycle.vocabulary import DirectiveOutcome, Tier
from tests.engine_bridge.drivers.cache_nodes import KEYS, TARGET, pair

STORES = st.sets(st.sampled_from(["l1", "l2"]))


def found(key: bytes, *tiers: str, rank: int = 0, shared: bool = False) -> Found:
    placements = tuple(Placement("a", tier, "fs", 1, shared=shared) for tier in tiers)
    return Found(ObjectKey(key.hex(), "m", rank), placements)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=8))
def test_gone_is_exactly_what_was_clean_twice_in_a_row(rounds: list[list[bool]]) -> None:
    progress = Progress(KEYS)
    for clean in rounds:
        for key in progress.pending():
            progress.look(key, clean[KEYS.index(key)])
    expected = []
    for index, key in enumerate(KEYS):
        looks = [clean[index] for clean in rounds]
        if any(all(looks[at : at + LOOKS_NEEDED]) for at in range(len(looks) - LOOKS_NEEDED + 1)):
            expected.append(key)
    assert progress.done() == expected
    result = progress.result((Tier.L1,), "why", removed=True)
    assert result.gone == b"".join(expected)
    assert (result.applied, result.skipped) == (len(expected), len(KEYS) - len(expected))
    assert (result.outcome is DirectiveOutcome.APPLIED) == (len(expected) == len(KEYS))


def test_what_is_left_alone_does_not_fail_the_rest_and_is_told() -> None:
    progress = Progress(KEYS[:3])
    progress.leave_alone(KEYS[:1], "pinned")
    progress.leave_alone(KEYS[1:2], "alive again")
    for _ in range(LOOKS_NEEDED):
        for key in progress.pending():
            progress.look(key, clean=True)
    result = progress.result((Tier.L1, Tier.L2), "", removed=True)
    assert result.outcome is DirectiveOutcome.APPLIED
    assert (result.applied, result.skipped, result.gone) == (1, 2, KEYS[2])
    assert result.reason == "1 alive again; 1 pinned"


def test_a_failure_says_how_much_and_why() -> None:
    result = Progress(KEYS).result((Tier.L1,), "copies are in use", removed=True)
    assert result.outcome is DirectiveOutcome.FAILED
    assert result.reason == "5 of 5 not confirmed: copies are in use"


@given(STORES, STORES)
def test_any_copy_of_any_rank_counts_for_presence(first: set[str], second: set[str]) -> None:
    chunks = by_chunk([found(KEYS[0], *first), found(KEYS[0], *second, rank=1)])
    assert tiers_of(chunks[KEYS[0]]) == {Tier(tier) for tier in first | second}


@given(STORES, STORES)
def test_l1_may_go_only_if_every_rank_in_it_has_an_l2_copy(first: set[str], second: set[str]) -> None:
    objects = [found(KEYS[0], *first), found(KEYS[0], *second, rank=1)]
    assert is_covered(objects) == all("l2" in rank for rank in (first, second) if "l1" in rank)


def test_a_copy_is_reached_at_its_server_or_anywhere_if_the_pool_is_shared() -> None:
    here = {"b": Instance("b", "10.0.0.2", 8080)}
    private, shared = found(KEYS[0], "l2").placements[0], found(KEYS[0], "l2", shared=True).placements[0]
    assert reachable_from(private, here) is None
    assert reachable_from(shared, here) == here["b"]
    assert reachable_from(private, {"a": Instance("a", "fd00::1", 8080)} | here) == Instance(
        "a", "fd00::1", 8080
    )
    assert reachable_from(shared, {}) is None


def test_server_urls_bracket_ipv6() -> None:
    assert Instance("a", "fd00::1", 8080).url == "http://[fd00::1]:8080"
    assert Instance("a", "10.0.0.2", 8080).url == "http://10.0.0.2:8080"


class Forgetful:
    """A cache server and a coordinator in one whose directory shows only the keys in `shown`."""

    def __init__(self) -> None:
        self.url = ""
        self.l1: set[str] = set()
        self.l2: set[str] = set()
        self.shown: set[str] = set()
        self.asked_l2: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else None
        if request.path == "/instances":
            port = request.url.port
            instance = {"instance_id": "a", "ip": "127.0.0.1", "http_port": port}
            return web.json_response({"instances": [instance]})
        if request.path == "/config/adapters":
            return web.json_response({"adapters": [{"type_name": "fs"}]})
        if request.path == "/directory/lookup":
            return web.json_response({"results": [self.found(each) for each in body["keys"]]})
        if request.path == "/cache/objects":
            names = [each["chunk_hash_hex"] for each in body["keys"]]
            if body["tier"] == "l1":
                self.l1 -= set(names)
            else:
                self.asked_l2 += names
                self.l2 -= set(names)
            return web.json_response({"deleted": len(names), "skipped": 0, "ok": True})
        return web.Response(status=404)

    def found(self, key: dict[str, Any]) -> dict[str, Any]:
        name = key["chunk_hash_hex"]
        tiers = [t for t, there in (("l1", self.l1), ("l2", self.l2)) if name in there & self.shown]
        places = [{"instance_id": "a", "tier": tier, "backend": "fs", "size_bytes": 1} for tier in tiers]
        return {"key": key, "placements": places}


@asynccontextmanager
async def forgetful() -> AsyncIterator[tuple[Forgetful, LmcacheClient]]:
    fleet = Forgetful()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", fleet.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = LmcacheClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield fleet, client
    await client.close()
    await runner.cleanup()


async def test_what_the_directory_has_forgotten_is_deleted_all_the_same() -> None:
    names = [key.hex() for key in KEYS]
    async with forgetful() as (fleet, client):
        fleet.l1, fleet.l2, fleet.shown = set(names), set(names), set(names[:1])
        target = Target("m", "", Layout(world_sizes=frozenset({1}), object_groups=frozenset({0})))
        alive = KEYS[4]
        result = await ChunkRemover(client, 0.0, 5).reclaim(KEYS, target, lambda key: key != alive)
        assert fleet.l1 == fleet.l2 == {alive.hex()}
        assert result.gone == b"".join(KEYS[:4])
        assert len(fleet.asked_l2) == len(set(fleet.asked_l2)), "once each"


async def test_deletes_fan_out_to_every_server() -> None:
    async with pair() as (_, one, two, client):
        result = await ChunkRemover(client, 0.0, 5).reclaim(KEYS, TARGET, lambda key: True)
        assert result.outcome is DirectiveOutcome.APPLIED
        assert one.l1 == one.l2 == two.l1 == two.l2 == set()


async def test_a_server_that_is_away_keeps_nobody_elses_copies_and_nothing_counts_as_gone() -> None:
    async with pair() as (_, one, two, client):
        await one.stop()
        result = await ChunkRemover(client, 0.0, 3).reclaim(KEYS, TARGET, lambda key: True)
        assert result.outcome is DirectiveOutcome.FAILED
        assert "one is away" in result.reason
        assert result.gone == b""
        assert two.l1 == two.l2 == set()
        await one.start()
        again = await ChunkRemover(client, 0.0, 3).reclaim(KEYS, TARGET, lambda key: True)
        assert again.gone == b"".join(KEYS)
        assert one.l1 == one.l2 == set()


async def test_a_server_that_was_given_up_owes_only_what_its_own_l2_shows() -> None:
    async with pair() as (fleet, one, _, client):
        await one.stop()
        fleet.registered = ["two"]
        one.l2 = {KEYS[0].hex()}
        result = await ChunkRemover(client, 0.0, 3).reclaim(KEYS, TARGET, lambda key: True)
        assert result.gone == b"".join(KEYS[1:])
        assert "copies on one cannot be reached" in result.reason


async def test_what_becomes_alive_while_a_server_is_away_is_left_alone() -> None:
    async with pair() as (fleet, one, _, client):
        await one.stop()
        alive: set[bytes] = set()

        def still_dead(key: bytes) -> bool:
            if fleet.asked > 1:
                alive.add(KEYS[0])
            return key not in alive

        await ChunkRemover(client, 0.0, 3).reclaim(KEYS, TARGET, still_dead)
        assert KEYS[0].hex() in one.l1
        await one.start()
        await ChunkRemover(client, 0.0, 3).reclaim(KEYS, TARGET, still_dead)
        assert one.l1 == {KEYS[0].hex()}


async def test_a_demotion_goes_on_beside_a_server_that_is_away() -> None:
    async with pair() as (_, one, two, client):
        await one.stop()
        result = await ChunkRemover(client, 0.0, 3).demote(KEYS, TARGET, lambda key: True)
        assert result.outcome is DirectiveOutcome.FAILED
        assert two.l1 == set()
        assert two.l2 == {key.hex() for key in KEYS}
