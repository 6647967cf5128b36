"""What a cache server missed while it was away is deleted when it is back, if it is still dead."""

from engine_bridge.drivers.lmcache_client import Instance
from engine_bridge.drivers.lmcache_keys import ObjectKey
from engine_bridge.drivers.lmcache_owed import MAX_GONE, MAX_OBJECTS, OwedDeletes
from engine_bridge.drivers.lmcache_reclaim import ChunkRemover
from lifecycle.vocabulary import DirectiveOutcome
from tests.engine_bridge.drivers.cache_nodes import KEYS, TARGET, pair

NAMES = {key.hex() for key in KEYS}


def always(key: bytes) -> bool:
    return True


async def test_copies_that_were_never_reported_are_deleted_when_their_server_is_back() -> None:
    async with pair() as (fleet, one, two, client):
        remover = ChunkRemover(client, 0.0, 3)
        other = [bytes([9]) * 32]
        assert (await remover.reclaim(other, TARGET, always)).outcome is DirectiveOutcome.APPLIED
        await one.stop()
        fleet.registered, fleet.untold = ["two"], {"one"}
        result = await remover.reclaim(KEYS, TARGET, always)
        assert result.gone == b"".join(KEYS)
        assert (two.l2, one.l2) == (set(), NAMES)
        await one.start()
        fleet.registered = ["one", "two"]
        await remover.collect_owed()
        assert one.l2 == set(), "whether or not anything else is freed meanwhile"


async def test_a_server_that_is_back_under_another_id_does_what_it_owes() -> None:
    async with pair() as (fleet, one, _two, client):
        remover = ChunkRemover(client, 0.0, 3)
        other = [bytes([9]) * 32]
        assert (await remover.reclaim(other, TARGET, always)).outcome is DirectiveOutcome.APPLIED
        await one.stop()
        fleet.registered, fleet.untold = ["two"], {"one", "one-anew"}
        assert (await remover.reclaim(KEYS, TARGET, always)).gone == b"".join(KEYS)
        one.name = "one-anew"
        await one.start()
        fleet.registered = ["one-anew", "two"]
        await remover.reclaim(other, TARGET, always)
        assert one.l2 == set()


async def test_what_is_alive_again_by_then_stays() -> None:
    async with pair() as (_, one, two, client):
        owed = OwedDeletes(client)
        alive: set[bytes] = set()
        objects = TARGET.objects(KEYS)
        instances = [Instance(node.name, "127.0.0.1", node.port) for node in (one, two)]
        first, second = (each.url for each in instances)
        owed.made([], [first, second], always)
        owed.made(objects, [second], lambda key: key not in alive)
        assert (owed.num_owed(first), owed.num_owed(second)) == (len(KEYS), 0)
        alive.add(KEYS[0])
        await owed.collect(instances)
        assert one.l2 == {KEYS[0].hex()}
        assert two.l2 == NAMES, "it owes nothing"
        assert owed.num_owed(first) == 1
        alive.clear()
        await owed.collect(instances)
        assert one.l2 == set()


async def test_a_server_that_fails_again_owes_on() -> None:
    async with pair() as (_, one, _two, client):
        owed = OwedDeletes(client)
        where = [Instance("one", "127.0.0.1", one.port)]
        owed.made([], [where[0].url], always)
        owed.made(TARGET.objects(KEYS), ["two"], always)
        await one.stop()
        await owed.collect(where)
        assert owed.num_owed(where[0].url) == len(KEYS)
        await one.start()
        await owed.collect(where)
        assert owed.num_owed(where[0].url) == 0


async def test_it_does_not_grow_for_ever() -> None:
    async with pair() as (_, _one, _two, client):
        owed = OwedDeletes(client)
        owed.made([], ["one"], always)
        owed.made([ObjectKey(f"{n:064x}", "m", 0) for n in range(MAX_OBJECTS + 10)], ["two"], always)
        assert owed.num_owed("one") == MAX_OBJECTS


async def test_only_the_servers_that_went_last_are_remembered() -> None:
    async with pair() as (_, _one, _two, client):
        owed = OwedDeletes(client)
        objects = TARGET.objects(KEYS)
        for n in range(MAX_GONE + 4):
            owed.made(objects, [f"server-{n}"], always)
        owed.made(objects, [], always)
        remembered = [n for n in range(MAX_GONE + 4) if owed.num_owed(f"server-{n}")]
        assert remembered == list(range(4, MAX_GONE + 4))
