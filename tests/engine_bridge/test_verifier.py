"""A chunk counts when the cache itself showed it; it is ours when it was not there before our call."""

import asyncio
from array import array

import pytest

from engine_bridge.cache_events import BlocksStored, EventBatch
from engine_bridge.call_blocks import CallBlocks
from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.verifier import Before, ComputedCall, Verifier
from lifecycle.core.events import GenerationMapped
from lifecycle.core.ids import KEY_BYTES, split_keys
from lifecycle.core.observations import CallMapping, PromptMapping
from lifecycle.errors import LogUnavailable
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import MappingKind, Tier
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import Agent, GatedLog, ManualClock, books, replayed

SIZE = 4
PROMPT = tuple(range(100, 114))
KEYS = chunk_keys(array("I", PROMPT), SIZE)
SESSION = "s1"
LOOKS = (0.0,) * 6


class Engine(CallBlocks):
    """The engine's stream, as the test tells it: blocks of one chunk's size, or of half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = True

    def computed(self, tokens: tuple[int, ...], session_id: str = SESSION) -> None:
        """Report every full block of a token sequence; those reported before are the same blocks."""
        parent: int | None = None
        for start in range(0, len(tokens) - SIZE + 1, SIZE):
            block = tokens[start : start + SIZE]
            name = hash((parent, block)) & (1 << 62) - 1
            event = BlocksStored(
                tier=Tier.GPU,
                hashes=(name,),
                parent=parent,
                token_ids=block,
                block_size=SIZE,
                session_id=session_id,
            )
            self.take(EventBatch(incarnation=1, sequence=1, at_ns=1, events=(event,)))
            parent = name

    def stepped(self, tokens: tuple[int, ...], start: int, end: int) -> None:
        """Report in one event all blocks of half a chunk's size that a step filled."""
        half = SIZE // 2
        names = [hash(tokens[:at]) & (1 << 62) - 1 for at in range(half, len(tokens) + 1, half)]
        event = BlocksStored(
            tier=Tier.GPU,
            hashes=tuple(names[start // half : end // half]),
            parent=names[start // half - 1] if start else None,
            token_ids=tokens[start : end // half * half],
            block_size=half,
            session_id=SESSION,
        )
        self.take(EventBatch(incarnation=1, sequence=1, at_ns=1, events=(event,)))


def chunk_after(prompt: tuple[int, ...], generated: tuple[int, ...]) -> bytes:
    """Keys of the chunks that generated tokens fill."""
    return chunk_keys(array("I", prompt + generated), SIZE)[len(KEYS) :]


class Scene:
    def __init__(self) -> None:
        self.log = GatedLog(MemoryEventLog())
        self.tracker = Tracker(self.log, ManualClock())
        self.cache = FakeCache()
        self.engine = Engine()
        self.verifier = Verifier(self.tracker, self.cache, self.engine, LOOKS)
        self.agent = Agent(self.tracker, "a")

    async def called(self, call_id: str = "c1", num_choices: int = 1) -> None:
        """A call of one message, mapped and over."""
        if not self.tracker.contexts.states:
            await self.tracker.start()
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
            "token_ids": PROMPT,
            "num_tokens": len(PROMPT),
            "chunk_size": SIZE,
            "completed": True,
            "session_id": SESSION,
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


async def test_what_the_engine_computed_and_the_cache_shows_is_ours(scene: Scene) -> None:
    scene.cache.store(KEYS)
    await scene.verify(cached_tokens=0)
    assert all(scene.flags(k) == {"VERIFIED", "OURS"} for k in split_keys(KEYS))
    assert not scene.agent.state.unmapped
    assert len(scene.cache.located) == 1


async def test_what_the_engine_found_cached_is_verified_but_not_ours(scene: Scene) -> None:
    scene.cache.store(KEYS)
    await scene.verify(cached_tokens=2 * SIZE)
    first, second, last = split_keys(KEYS)
    assert scene.flags(first) == scene.flags(second) == {"VERIFIED"}
    assert scene.flags(last) == {"VERIFIED", "OURS"}
    assert not scene.agent.state.unmapped


async def test_a_chunk_found_in_part_was_not_there_whole(scene: Scene) -> None:
    scene.cache.store(KEYS)
    await scene.verify(cached_tokens=SIZE + 1)
    assert [sorted(scene.flags(k)) for k in split_keys(KEYS)] == [["VERIFIED"], *[["OURS", "VERIFIED"]] * 2]


async def test_a_last_token_computed_again_makes_no_chunk_ours(scene: Scene) -> None:
    scene.cache.store(KEYS)
    await scene.verify(cached_tokens=3 * SIZE - 1, num_tokens=3 * SIZE, token_ids=PROMPT[: 3 * SIZE])
    assert all(scene.flags(k) == {"VERIFIED"} for k in split_keys(KEYS))


async def test_with_several_engines_a_copy_that_lay_elsewhere_is_not_ours_for_being_computed(
    scene: Scene,
) -> None:
    first, second, last = split_keys(KEYS)
    scene.cache.store(first)
    scene.verifier = Verifier(scene.tracker, scene.cache, scene.engine, LOOKS, several=True)
    before = await scene.verifier.before(NAMESPACE, KEYS)
    assert before == Before(frozenset({second, last}), frozenset({first}))
    scene.cache.store(KEYS)
    await scene.verify(before=before, cached_tokens=0)
    assert scene.flags(first) == {"VERIFIED"}
    assert scene.flags(second) == scene.flags(last) == {"VERIFIED", "OURS"}


async def test_what_was_absent_before_the_call_is_ours_whatever_the_engine_counted(scene: Scene) -> None:
    first, second, last = split_keys(KEYS)
    scene.cache.store(first)
    absent = (await scene.verifier.before(NAMESPACE, KEYS)).absent
    assert absent == {second, last}
    scene.cache.store(KEYS)
    await scene.verify(before=Before(absent))
    assert scene.flags(first) == {"VERIFIED"}
    assert scene.flags(second) == scene.flags(last) == {"VERIFIED", "OURS"}


async def test_a_cache_that_cannot_be_asked_before_proves_nothing(scene: Scene) -> None:
    scene.cache.unreachable = True
    assert (await scene.verifier.before(NAMESPACE, KEYS)).absent == frozenset()


async def test_what_the_engine_s_events_show_as_computed_is_ours_without_any_count(scene: Scene) -> None:
    first, second, last = split_keys(KEYS)
    scene.cache.store(KEYS)
    scene.engine.stepped(PROMPT, 0, SIZE)
    scene.engine.stepped(PROMPT, SIZE, len(PROMPT))
    await scene.verify(completed=False, output_tokens=-1)
    assert scene.flags(first) == {"VERIFIED"}, "a whole chunk in an event of its own may have been loaded"
    assert scene.flags(second) == scene.flags(last) == {"VERIFIED", "OURS"}


async def test_of_a_computed_chunk_that_was_not_to_be_stored_nothing_is_claimed(scene: Scene) -> None:
    scene.cache.store(KEYS)
    scene.engine.stepped(PROMPT, 0, len(PROMPT))
    await scene.verify(completed=False, output_tokens=-1, stored_limit=SIZE)
    assert [scene.flags(k) for k in split_keys(KEYS)] == [{"VERIFIED", "OURS"}, set(), set()]


async def test_a_chunk_known_for_long_becomes_ours_when_a_call_stores_it_again(scene: Scene) -> None:
    scene.cache.store(KEYS)
    await scene.verify()
    assert scene.flags(KEYS[:KEY_BYTES]) == {"VERIFIED"}
    await scene.called("c2")
    await scene.verify("c2", cached_tokens=0)
    assert all(scene.flags(k) == {"VERIFIED", "OURS"} for k in split_keys(KEYS))
    assert (await scene.verifier.before(NAMESPACE, KEYS)).absent == frozenset()


async def test_a_copy_that_comes_late_is_waited_for(scene: Scene) -> None:
    class Late(FakeCache):
        async def locate(self, namespace, keys):  # type: ignore[no-untyped-def]
            if len(self.located) == 2:
                self.store(KEYS)
            return await super().locate(namespace, keys)

    scene.cache = Late()
    scene.cache.store(KEYS[:-KEY_BYTES])
    scene.verifier = Verifier(scene.tracker, scene.cache, scene.engine, LOOKS)
    await scene.verify(cached_tokens=0)
    assert all(scene.flags(k) == {"VERIFIED", "OURS"} for k in split_keys(KEYS))


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


async def test_other_tokens_in_the_engine_mean_that_ours_are_wrong(scene: Scene) -> None:
    scene.cache.store(KEYS[:KEY_BYTES])
    scene.engine.computed((*PROMPT[: SIZE + 1], 7, *PROMPT[SIZE + 2 :]))
    await scene.verify(cached_tokens=0)
    assert f"from token {SIZE} on" in scene.agent.state.unmapped


async def test_part_of_a_prompt_may_be_missing(scene: Scene) -> None:
    scene.cache.store(KEYS[: 2 * KEY_BYTES])
    await scene.verify()
    assert not scene.agent.state.unmapped


async def test_an_aborted_call_that_stored_nothing_proves_nothing(scene: Scene) -> None:
    await scene.verify(completed=False)
    assert not scene.agent.state.unmapped


async def test_what_an_aborted_call_left_unproven_behind_ours_is_left_to_be_proven(scene: Scene) -> None:
    first, second, last = split_keys(KEYS)
    scene.cache.store(first)
    await scene.verify(before=Before(frozenset({first})))  # it is ours, and the others are not there yet
    scene.cache.store(KEYS)
    await scene.called("c2")
    await scene.verify("c2", completed=False)
    assert list(scene.tracker.cut_off) == [(NAMESPACE, second + last)]


async def test_behind_nothing_of_ours_nothing_is_left_to_be_proven(scene: Scene) -> None:
    scene.cache.store(KEYS)
    await scene.verify(completed=False)
    assert scene.tracker.cut_off == {}


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


async def test_generated_chunks_are_found_and_are_ours(scene: Scene) -> None:
    generated = (1, 2, 3, 4, 5, 6)
    scene.engine.computed(PROMPT + generated)
    keys = chunk_after(PROMPT, generated)
    scene.cache.store(KEYS + keys)
    # The last generated token has no KV: seven leave six, which fill the tail of two and one chunk more.
    await scene.verify(output_tokens=7, cached_tokens=0)
    assert await scene.generations() == [keys]
    assert all(scene.flags(k) == {"VERIFIED", "OURS"} for k in split_keys(keys))


async def test_what_another_call_computed_behind_the_same_prompt_is_not_this_ones(scene: Scene) -> None:
    scene.engine.computed((*PROMPT, 1, 2, 3, 4, 5, 6), session_id="another")
    scene.cache.store(KEYS + chunk_after(PROMPT, (1, 2, 3, 4, 5, 6)))
    await scene.verify(output_tokens=9)
    assert await scene.generations() == []


async def test_every_choice_is_a_generation_of_its_own() -> None:
    scene = Scene()
    await scene.called(num_choices=3)
    for n in range(3):
        scene.engine.computed((*PROMPT, n, n))
    ends = [chunk_after(PROMPT, (n, n)) for n in range(3)]
    scene.cache.store(KEYS + b"".join(ends))
    await scene.verify(output_tokens=9, num_choices=3)
    assert sorted(await scene.generations()) == sorted(ends)


async def test_an_uncounted_output_may_be_of_any_length(scene: Scene) -> None:
    generated = tuple(range(10))
    scene.engine.computed(PROMPT + generated)
    keys = chunk_after(PROMPT, generated)
    scene.cache.store(KEYS + keys)
    await scene.verify(output_tokens=-1)
    (found,) = await scene.generations()
    assert found == keys
    assert len(found) == 3 * KEY_BYTES


async def test_without_a_label_of_its_own_no_generation_is_known(scene: Scene) -> None:
    scene.engine.computed((*PROMPT, 1, 2), session_id="")
    scene.cache.store(KEYS)
    await scene.verify(output_tokens=100, session_id="")
    assert await scene.generations() == []
    assert len(scene.cache.located) == 1


async def test_a_proof_waits_for_the_log_behind_what_the_call_did(scene: Scene) -> None:
    scene.log.away = LogUnavailable("away")
    await scene.called("c2")
    assert scene.tracker.degraded
    absent = (await scene.verifier.before(NAMESPACE, KEYS)).absent
    scene.cache.store(KEYS)
    verified = asyncio.ensure_future(scene.verify("c2", before=Before(absent)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not scene.cache.asked
    scene.log.away = None
    await scene.tracker.retry_waiting()
    await asyncio.wait_for(verified, 10)
    assert all(scene.flags(key) == {"VERIFIED", "OURS"} for key in split_keys(KEYS))


async def test_a_directory_that_started_anew_proves_no_absence(scene: Scene) -> None:
    blind = Verifier(scene.tracker, scene.cache, scene.engine, LOOKS, blind=lambda: True)
    assert (await blind.before(NAMESPACE, KEYS)).absent == frozenset()
    assert (await scene.verifier.before(NAMESPACE, KEYS)).absent == set(split_keys(KEYS))
