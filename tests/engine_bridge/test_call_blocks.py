"""What calls computed and generated, from the engine's block events, whatever was cached before."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    EventsMissed,
    IncarnationChanged,
    TierCleared,
)
from engine_bridge.call_blocks import MAX_TOKENS, CallBlocks
from engine_bridge.chunk_keys import chunk_keys
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import Tier

BLOCK, CHUNK = 2, 4
TOKENS = st.lists(st.integers(0, 3), max_size=14)


class Engine:
    """A prefix cache that never forgets unless told, and reports as vLLM does: new full blocks, in order."""

    def __init__(self, into: CallBlocks) -> None:
        self._into = into
        self._cached: set[int] = set()

    def run(self, token_ids: list[int], session: str | None) -> None:
        """Report the full blocks of a sequence that are not cached yet, one event a run of them."""
        names = [hash(tuple(token_ids[:end])) for end in range(BLOCK, len(token_ids) + 1, BLOCK)]
        for index, name in enumerate(names):
            if name not in self._cached:
                self._cached.add(name)
                self.report(
                    BlocksStored(
                        tier=Tier.GPU,
                        hashes=(name,),
                        parent=names[index - 1] if index else None,
                        token_ids=tuple(token_ids[index * BLOCK : (index + 1) * BLOCK]),
                        block_size=BLOCK,
                        session_id=session,
                    )
                )

    def report(self, *events: CacheEvent) -> None:
        self._into.take(EventBatch(incarnation=1, sequence=0, at_ns=0, events=events))


def keys_of(token_ids: list[int]) -> list[bytes]:
    return split_keys(chunk_keys(array("I", token_ids), CHUNK))


def generated(blocks: CallBlocks, prompt: list[int], session: str = "call") -> list[bytes]:
    keys = keys_of(prompt)
    tail = prompt[len(keys) * CHUNK :]
    return [chunk.key for chunk in blocks.generated(session, b"".join(keys), tail, CHUNK)]


@given(TOKENS, TOKENS, TOKENS, st.integers(0, 14))
def test_all_full_chunks_behind_the_prompt_are_found_whatever_part_of_it_was_cached(
    prompt: list[int], ending: list[int], earlier: list[int], common: int
) -> None:
    blocks = CallBlocks()
    engine = Engine(blocks)
    cached = prompt[:common] + earlier
    engine.run(cached, None)
    engine.run(prompt, "call")
    engine.run(prompt + ending, "call")
    expected = keys_of(prompt + ending)[len(prompt) // CHUNK :]
    foreseen = len(prompt) // BLOCK * BLOCK + BLOCK
    if cached[:foreseen] == (prompt + ending)[:foreseen] and len(cached) >= foreseen:
        # another call generated the same before, and the engine does not report it again
        assert set(generated(blocks, prompt)) <= set(expected)
    else:
        assert generated(blocks, prompt) == expected


@given(TOKENS, st.lists(TOKENS, min_size=1, max_size=3))
def test_choices_of_one_call_make_a_tree(prompt: list[int], endings: list[list[int]]) -> None:
    blocks = CallBlocks()
    engine = Engine(blocks)
    for ending in endings:
        engine.run(prompt + ending, "call")
    at = len(prompt) // CHUNK
    assert set(generated(blocks, prompt)) == {key for end in endings for key in keys_of(prompt + end)[at:]}


def test_another_call_s_blocks_are_not_mixed_in() -> None:
    blocks = CallBlocks()
    engine = Engine(blocks)
    engine.run([1, 1, 1, 2, 2, 2, 2, 2], "call")
    engine.run([1, 1, 1, 3, 3, 3, 3, 3], "other")
    assert generated(blocks, [1, 1, 1]) == keys_of([1, 1, 1, 2, 2, 2, 2, 2])
    assert generated(blocks, [1, 1, 1], "other")[-1] == keys_of([1, 1, 1, 3, 3, 3, 3, 3])[-1]
    assert generated(blocks, [1, 1, 1], "nobody") == []


def test_a_block_behind_an_unknown_one_is_not_guessed_at() -> None:
    blocks = CallBlocks()
    engine = Engine(blocks)
    engine.run([1, 1], None)
    for lost in (
        TierCleared(tier=Tier.GPU),
        IncarnationChanged(incarnation=2),
        BlocksRemoved(tier=Tier.GPU, hashes=(hash((1, 1)),)),
    ):
        engine.report(lost)
        engine.run([1, 1, 2, 2], "call")
        assert generated(blocks, [1, 1]) == []
    fresh = Engine(blocks)
    fresh.run([1, 1], None)
    fresh.report(BlocksRemoved(tier=Tier.L1, hashes=(hash((1, 1)),)))
    fresh.run([1, 1, 2, 2], "call")
    assert generated(blocks, [1, 1]) == keys_of([1, 1, 2, 2])


def test_a_forgotten_call_leaves_nothing() -> None:
    blocks = CallBlocks()
    Engine(blocks).run([1, 1, 2, 2], "call")
    blocks.forget("call")
    blocks.forget("call")
    assert generated(blocks, [1, 1]) == []


LARGE_CHUNK = 8
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=40)


class LoadingEngine:
    """A prefix cache before a chunk cache, as vLLM drives LMCache's connector.

    A prompt's first chunks, as many as the chunk cache has, are loaded before anything is computed; of one
    that it has whole the last token is computed all the same. What is computed at a time is bounded.
    """

    def __init__(self, into: CallBlocks) -> None:
        self._into = into
        self._blocks: set[tuple[int, ...]] = set()
        self.chunks: set[tuple[int, ...]] = set()

    def run(self, prompt: list[int], session: str | None, budget: int, num_steps: int = 99) -> int:
        """Work on a prompt for some steps; answers how many of its chunks the chunk cache had."""
        ends = range(BLOCK, len(prompt), BLOCK)
        here = next((e - BLOCK for e in ends if tuple(prompt[:e]) not in self._blocks), 0)
        ends = range(LARGE_CHUNK, len(prompt) + 1, LARGE_CHUNK)
        there = next((e - LARGE_CHUNK for e in ends if tuple(prompt[:e]) not in self.chunks), None)
        if there is None:
            there = len(prompt) // LARGE_CHUNK * LARGE_CHUNK
        loaded = there - (there == len(prompt))
        at = here
        if loaded > here:
            self._report(prompt, here, loaded, session)
            at = loaded
        while at < len(prompt) and num_steps:
            upto = min(at + budget, len(prompt))
            self._report(prompt, at, upto, session)
            at, num_steps = upto, num_steps - 1
        self.chunks.update(tuple(prompt[:e]) for e in ends if e <= at)
        return there // LARGE_CHUNK

    def forget_blocks(self) -> None:
        self._blocks.clear()

    def _report(self, prompt: list[int], start: int, end: int, session: str | None) -> None:
        ends = [e for e in range(BLOCK, end + 1, BLOCK) if e > start]
        ends = [e for e in ends if tuple(prompt[:e]) not in self._blocks]
        if not ends:
            return
        self._blocks.update(tuple(prompt[:e]) for e in ends)
        first = ends[0] - BLOCK
        event = BlocksStored(
            tier=Tier.GPU,
            hashes=tuple(hash(tuple(prompt[:e])) for e in ends),
            parent=hash(tuple(prompt[:first])) if first else None,
            token_ids=tuple(prompt[first : ends[-1]]),
            block_size=BLOCK,
            session_id=session,
        )
        self._into.take(EventBatch(incarnation=1, sequence=0, at_ns=0, events=(event,)))


@given(
    st.lists(st.tuples(PROMPTS, st.integers(1, 4)), max_size=3),
    PROMPTS,
    st.sampled_from([2, 8, 16, 64]),
    st.booleans(),
    st.integers(1, 4),
)
def test_no_chunk_that_the_cache_had_counts_as_computed(
    others: list[tuple[list[int], int]], prompt: list[int], budget: int, forgets: bool, num_steps: int
) -> None:
    blocks = CallBlocks()
    engine = LoadingEngine(blocks)
    for other, steps in others:  # whole, or given up on after some steps
        engine.run(other, None, budget, steps)
        engine.run(prompt[: len(other)], None, budget, steps)
    if forgets:
        engine.forget_blocks()
    num_found = engine.run(prompt, "call", budget, num_steps)
    engine.run(prompt, None, budget)
    computed = blocks.computed_chunks("call", len(prompt), LARGE_CHUNK)
    assert computed <= set(range(num_found, len(prompt) // LARGE_CHUNK))


@given(PROMPTS, PROMPTS)
def test_of_a_prompt_computed_in_one_step_all_chunks_count_that_had_to_be(
    other: list[int], prompt: list[int]
) -> None:
    blocks = CallBlocks()
    engine = LoadingEngine(blocks)
    engine.run(other, None, 64)
    engine.forget_blocks()
    num_found = engine.run(prompt, "call", 64)
    expected = set(range(num_found, len(prompt) // LARGE_CHUNK))
    tells = num_found or len(prompt) % LARGE_CHUNK >= BLOCK
    assert blocks.computed_chunks("call", len(prompt), LARGE_CHUNK) == (expected if tells else set())


@given(PROMPTS, PROMPTS, st.sampled_from([2, 4, 8, 16]))
def test_what_is_computed_behind_the_first_step_counts_wherever_steps_end(
    other: list[int], prompt: list[int], budget: int
) -> None:
    blocks = CallBlocks()
    engine = LoadingEngine(blocks)
    engine.run(other, None, 64)
    engine.forget_blocks()
    num_found = engine.run(prompt, "call", budget)
    first_end = num_found * LARGE_CHUNK or min(budget, len(prompt))
    whole = len(prompt) // LARGE_CHUNK - (len(prompt) % LARGE_CHUNK == 0)
    expected = set(range(first_end // LARGE_CHUNK + (first_end % LARGE_CHUNK > 0), whole))
    assert blocks.computed_chunks("call", len(prompt), LARGE_CHUNK) >= expected


def test_what_is_loaded_after_an_interruption_was_computed_before_it() -> None:
    blocks = CallBlocks()
    engine = LoadingEngine(blocks)
    prompt = [1] * 30
    engine.run(prompt, "call", 10, 2)
    engine.forget_blocks()
    engine.run(prompt, "call", 64)
    assert blocks.computed_chunks("call", 30, LARGE_CHUNK) == {0, 1, 2}


def test_a_call_under_way_while_events_were_lost_proves_nothing() -> None:
    blocks = CallBlocks()
    engine = LoadingEngine(blocks)
    engine.run([1] * 30, "call", 10, 1)
    missed = EventsMissed(first=3, last=4)
    blocks.take(EventBatch(incarnation=1, sequence=5, at_ns=0, events=(missed,)))
    engine.run([1] * 30, "call", 64)
    assert blocks.computed_chunks("call", 30, LARGE_CHUNK) == set()
    engine.run([2] * 30, "another", 64)
    assert blocks.computed_chunks("another", 30, LARGE_CHUNK) == {0, 1, 2}


def test_calls_that_nobody_asks_about_are_forgotten_oldest_first() -> None:
    blocks = CallBlocks()
    width, num_blocks = 1000, 100

    def computes(call: int) -> set[int]:
        """A call computes a prompt of its own; answers what is known of it."""
        stored = BlocksStored(
            tier=Tier.GPU,
            hashes=tuple(range(call * num_blocks, (call + 1) * num_blocks)),
            parent=None,
            token_ids=(call,) * width * num_blocks,
            block_size=width,
            session_id=f"call {call}",
        )
        blocks.take(EventBatch(incarnation=1, sequence=0, at_ns=0, events=(stored,)))
        return known(call)

    def known(call: int) -> set[int]:
        return blocks.computed_chunks(f"call {call}", width * num_blocks, 3 * width)

    num_calls = MAX_TOKENS // (width * num_blocks)
    assert all(computes(call) == set(range(33)) for call in range(num_calls + 1))
    assert known(0) == set()
    assert all(known(call) for call in range(1, num_calls + 1))
    for call in range(num_calls + 1):
        blocks.forget(f"call {call}")
    assert all(computes(call) for call in range(num_calls, 2 * num_calls))
    assert known(num_calls)
