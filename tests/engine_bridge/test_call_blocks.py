"""Generated chunks from the engine's block events, whatever was in its prefix cache before."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    IncarnationChanged,
    TierCleared,
)
from engine_bridge.call_blocks import CallBlocks
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
