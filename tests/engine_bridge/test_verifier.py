"""A chunk counts when the cache itself showed it; it is ours when its store was reported during our call."""

from array import array

import pytest

from engine_bridge.cache_events import BlocksStored, CacheEvent, EventBatch, chunk_key, short_hash
from engine_bridge.chunk_keys import ROOT, chunk_keys
from engine_bridge.verifier import ComputedCall, StoreJournal, Verifier
from lifecycle.core.events import GenerationMapped
from lifecycle.core.ids import KEY_BYTES, split_keys
from lifecycle.core.observations import CallMapping, PromptMapping
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import MappingKind, Tier
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import Agent, ManualClock, books, replayed

SIZE = 4
PROMPT = tuple(range(100, 114))
KEYS = chunk_keys(array("I", PROMPT), SIZE)
TAIL = PROMPT[len(KEYS) // KEY_BYTES * SIZE :]
LOOKS = (0.0,) * 6


class Watch(StoreJournal):
    """A journal whose clock is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 10.0
        self.live = True

    def now(self) -> float:
        return self.time

    def stored(self, parent: bytes, *chunks: tuple[int, ...]) -> bytes:
        """Report stores of chunks one behind the other; answers the last key."""
        events: list[CacheEvent] = []
        for tokens in chunks:
            key = chunk_key(parent, tokens)
            events.append(
                BlocksStored(
                    tier=Tier.L1,
                    hashes=(short_hash(key),),
                    parent=None if parent == ROOT else short_hash(parent),
                    token_ids=tokens,
                    block_size=SIZE,
                )
            )
            parent = key
        self.take(EventBatch(incarnation=1, sequence=1, at_ns=1, events=tuple(events)))
        return parent

    def stored_prompt(self) -> bytes:
        return self.stored(ROOT, *(PROMPT[i : i + SIZE] for i in range(0, len(PROMPT) - SIZE + 1, SIZE)))


class Scene:
    def __init__(self) -> None:
        self.log = MemoryEventLog()
        self.tracker = Tracker(self.log, ManualClock())
        self.cache = FakeCache()
        self.journal = Watch()
        self.verifier = Verifier(self.tracker, self.cache, self.journal, LOOKS)
        self.agent = Agent(self.tracker, "a")

    async def called(self, call_id: str = "c1", num_choices: int = 1) -> None:
        """A call of one message, mapped and over."""
        if not self.tracker.contexts.states:
            await self.agent.open()
        await self.agent.arrive("u1", call_id, num_choices)
        await self.tracker.observe(
            "a",
            CallMapping(
                at_ns=self.agent.now,
                call_id=call_id,
                attempt=1,
                mapping=PromptMapping(
                    kind=MappingKind.EXACT,
                    num_tokens=len(PROMPT),
                    head_end=2,
                    message_ends=(len(PROMPT) - 1,),
                    chunk_size=SIZE,
                    chunk_keys=KEYS,
                ),
            ),
        )
        await self.agent.first(call_id)
        await self.agent.end(call_id)

    async def verify(self, call_id: str = "c1", **changed: object) -> None:
        fields: dict[str, object] = {
            "uid": "a",
            "call_id": call_id,
            "attempt": 1,
            "namespace": NAMESPACE,
            "keys": KEYS,
            "tail_ids": TAIL,
            "num_tokens": len(PROMPT),
            "chunk_size": SIZE,
            "began": 10.0,
            "ended": 20.0,
            "completed": True,
            "output_tokens": 0,
        }
        await self.verifier.verify(ComputedCall(**{**fields, **changed}))  # type: ignore[arg-type]
        assert books(self.tracker.contexts) == books(await replayed(self.log))

    def flags(self, key: bytes) -> set[str]:
        described = self.tracker.contexts.index.describe(NAMESPACE, key)
        return set(described.flags) if described is not None else set()

    async def generations(self) -> list[bytes]:
        """Chunks told to be generated, by choice."""
        found = [r.event async for r in self.log.read_all() if isinstance(r.event, GenerationMapped)]
        return [e.keys for e in found]


@pytest.fixture
async def scene() -> Scene:
    made = Scene()
    await made.called()
    return made


async def test_what_was_stored_during_the_call_and_lies_somewhere_is_ours(scene: Scene) -> None:
    scene.journal.stored_prompt()
    scene.cache.store(KEYS)
    await scene.verify()
    assert all(scene.flags(k) == {"VERIFIED", "OURS"} for k in split_keys(KEYS))
    assert not scene.agent.state.unmapped
    assert len(scene.cache.located) == 1


async def test_what_lay_there_before_is_verified_but_not_ours(scene: Scene) -> None:
    scene.journal.time = 5.0
    scene.journal.stored_prompt()
    scene.cache.store(KEYS)
    await scene.verify()
    assert all(scene.flags(k) == {"VERIFIED"} for k in split_keys(KEYS))
    assert not scene.agent.state.unmapped


async def test_a_store_reported_after_the_directory_showed_it_is_ours_all_the_same(scene: Scene) -> None:
    class Late(FakeCache):
        async def locate(self, namespace, keys):  # type: ignore[no-untyped-def]
            found = await super().locate(namespace, keys)
            if len(self.located) == 2:
                scene.journal.stored_prompt()
            return found

    scene.cache = Late()
    scene.cache.store(KEYS[:-KEY_BYTES])
    scene.verifier = Verifier(scene.tracker, scene.cache, scene.journal, LOOKS)
    await scene.verify()
    first, second, last = split_keys(KEYS)
    assert scene.flags(first) == scene.flags(second) == {"VERIFIED", "OURS"}
    assert scene.flags(last) == set()


async def test_a_context_whose_keys_never_show_up_is_unmapped_until_a_later_call_is_confirmed(
    scene: Scene,
) -> None:
    await scene.verify()
    assert "no key computed" in scene.agent.state.unmapped
    assert len(scene.cache.located) == len(LOOKS)
    assert scene.tracker.contexts.index.unmapped_contexts(NAMESPACE) == ["a"]
    scene.cache.store(KEYS)
    await scene.called("c2")
    await scene.verify("c2")
    assert not scene.agent.state.unmapped
    assert scene.tracker.contexts.index.unmapped_contexts(NAMESPACE) == []


async def test_another_chunk_in_the_place_of_ours_means_our_keys_are_wrong(scene: Scene) -> None:
    scene.journal.stored(ROOT, (1, 2, 3, 4))
    scene.cache.store(KEYS[KEY_BYTES : 2 * KEY_BYTES])
    await scene.verify()
    assert "another chunk behind token 0" in scene.agent.state.unmapped


async def test_part_of_a_prompt_may_be_missing(scene: Scene) -> None:
    scene.cache.store(KEYS[: 2 * KEY_BYTES])
    await scene.verify()
    assert not scene.agent.state.unmapped


async def test_an_aborted_call_that_stored_nothing_proves_nothing(scene: Scene) -> None:
    await scene.verify(completed=False)
    assert not scene.agent.state.unmapped


async def test_admission_control_is_no_sign_of_wrong_keys(scene: Scene) -> None:
    await scene.verify(stored_limit=0)
    assert not scene.agent.state.unmapped
    assert scene.cache.located == []
    scene.cache.store(KEYS[:KEY_BYTES])
    await scene.verify(stored_limit=SIZE)
    assert scene.flags(KEYS[:KEY_BYTES]) == {"VERIFIED"}
    assert scene.flags(KEYS[KEY_BYTES : 2 * KEY_BYTES]) == set()


async def test_a_cache_that_cannot_be_asked_leaves_the_context_unmapped(scene: Scene) -> None:
    scene.cache.store(KEYS)
    scene.cache.unreachable = True
    await scene.verify()
    assert "could not be asked" in scene.agent.state.unmapped
    scene.cache.unreachable = False
    await scene.verify()
    assert not scene.agent.state.unmapped


async def test_generated_chunks_are_found_behind_the_prompt_and_no_further_than_generated(
    scene: Scene,
) -> None:
    last = scene.journal.stored_prompt()
    one, two, three = (*TAIL, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10)
    end = scene.journal.stored(last, one, two, three)
    scene.cache.store(KEYS)
    keys = [chunk_key(last, one)]
    keys += [chunk_key(keys[0], two)]
    scene.cache.store(b"".join(keys) + end)
    # The last generated token has no KV: seven leave six, which fill the tail of two and one chunk more.
    await scene.verify(output_tokens=7)
    assert await scene.generations() == [b"".join(keys)]
    assert all(scene.flags(k) == {"VERIFIED", "OURS"} for k in keys)
    assert scene.flags(end) == set()


async def test_what_a_later_call_stored_behind_the_same_prompt_is_not_this_ones(scene: Scene) -> None:
    last = scene.journal.stored_prompt()
    scene.journal.time = 25.0
    scene.journal.stored(last, (*TAIL, 1, 2))
    scene.cache.store(KEYS)
    await scene.verify(output_tokens=9)
    assert await scene.generations() == []


async def test_every_choice_is_a_generation_of_its_own() -> None:
    scene = Scene()
    await scene.called(num_choices=3)
    last = scene.journal.stored_prompt()
    ends = [scene.journal.stored(last, (*TAIL, n, n)) for n in range(3)]
    scene.cache.store(KEYS + b"".join(ends))
    await scene.verify(output_tokens=9, num_choices=3)
    assert sorted(await scene.generations()) == sorted(ends)


async def test_an_uncounted_output_may_be_of_any_length(scene: Scene) -> None:
    last = scene.journal.stored_prompt()
    end = scene.journal.stored(last, (*TAIL, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10))
    scene.cache.store(KEYS + end)
    await scene.verify(output_tokens=-1)
    (found,) = await scene.generations()
    assert found[-KEY_BYTES:] == end
    assert len(found) == 3 * KEY_BYTES


async def test_without_an_event_stream_no_store_is_ours_and_no_generation_is_known(scene: Scene) -> None:
    scene.journal.live = False
    scene.cache.store(KEYS)
    await scene.verify(output_tokens=100)
    assert scene.flags(KEYS[:KEY_BYTES]) == {"VERIFIED"}
    assert await scene.generations() == []


async def test_the_journal_forgets_the_oldest(scene: Scene) -> None:
    journal = scene.journal
    long = tuple(range(500_000))
    keys = [journal.stored(ROOT, (n, *long)) for n in range(6)]
    known = [journal.stored_since(key, 0.0) for key in keys]
    assert known == [False, False, False, True, True, True]
    assert not journal.behind(b"", (0,), (0.0, 100.0), 1)
    assert journal.others_behind(ROOT, keys[-1], 0.0)
