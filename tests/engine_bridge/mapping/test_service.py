"""Many contexts at once: same results as one at a time, states bounded and shareable."""

import asyncio

import pytest

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.anthropic import MessagesPrompt
from engine_bridge.mapping.backlog import MappingBacklog
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.plain import PlainPrompt
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.service import (
    INLINE_CHARS,
    INLINE_MESSAGES,
    MAX_BYTES_PER_CHAR,
    MAX_CHARS,
    MappingService,
)
from engine_bridge.mapping.workers import RenderWorkers
from tests.engine_bridge.mapping.conversations import CHATML, Walk, comparable, toy_profile


@pytest.fixture(scope="module")
def mapper():
    return ChatMapper(toy_profile(CHATML), 16)


@pytest.fixture
async def service(mapper):
    service = MappingService(mapper, RenderWorkers())
    yield service
    await service.close()


def prompts(seed, count=6):
    walk = Walk(seed)
    out = []
    for _ in range(count):
        out.append(walk.prompt())
        walk.step()
    return out


async def test_contexts_that_run_at_once_do_not_disturb_each_other(mapper, service):
    async def run(key, walk):
        return [comparable(await service.map(key, prompt)) for prompt in walk]

    walks = {f"c{seed}": prompts(seed) for seed in range(4)}
    results = await asyncio.gather(*(run(key, walk) for key, walk in walks.items()))
    for walk, got in zip(walks.values(), results, strict=True):
        assert got == [comparable(mapper.map(prompt)) for prompt in walk]


async def test_calls_of_one_context_wait_for_each_other(mapper, service):
    walk = prompts(7)
    results = await asyncio.gather(*(service.map("c", prompt) for prompt in walk))
    assert [comparable(got) for got in results] == [comparable(mapper.map(prompt)) for prompt in walk]
    assert service.token_ids("c") == results[-1].token_ids


async def test_long_lists_and_long_texts_take_the_slow_road_to_the_same_place(mapper, service):
    messages = [{"role": "user", "content": f"{at} " * 200} for at in range(2 * INLINE_MESSAGES)]
    prompt = ChatPrompt(messages=messages)
    assert comparable(await service.map("c", prompt)) == comparable(mapper.map(prompt))
    grown = ChatPrompt(messages=[*messages, {"role": "assistant", "content": "ok " * 9000}])
    mapped = await service.map("c", grown)
    assert comparable(mapped) == comparable(mapper.map(grown))
    assert mapped.num_kept_tokens > 0


async def test_a_failed_map_leaves_the_context_usable(mapper, service):
    good = ChatPrompt(messages=[{"role": "user", "content": "x"}])
    await service.map("c", good)
    with pytest.raises(RejectedByEngine):
        await service.map("c", ChatPrompt(messages=[{"role": "user", "content": 5}]))
    assert service.token_ids("c") is None
    assert comparable(await service.map("c", good)) == comparable(mapper.map(good))


async def test_a_prompt_that_no_model_could_take_is_not_tokenised(mapper, service):
    with pytest.raises(Unmappable, match="context"):
        await service.map("c", ChatPrompt(messages=[{"role": "user", "content": "x" * (MAX_CHARS + 1)}]))
    with pytest.raises(Unmappable, match="context"):
        await service.map("c", PlainPrompt("x" * (MAX_CHARS + 1)))
    prompt = ChatPrompt(messages=[{"role": "user", "content": "x"}])
    assert comparable(await service.map("c", prompt)) == comparable(mapper.map(prompt))


async def test_a_fork_starts_from_its_parents_tokens(mapper, service):
    walk = Walk(11, exotic=False)
    for _ in range(5):
        walk.messages += walk.tool_turn()
    parent = await service.map("parent", walk.prompt())
    assert service.clone("parent", "child")
    walk.messages += [walk.answer(), walk.user()]
    child = await service.map("child", walk.prompt())
    assert child.num_kept_tokens >= parent.message_ends[-1] - 1
    assert comparable(child) == comparable(mapper.map(walk.prompt()))
    assert service.token_ids("parent") == parent.token_ids


async def test_nothing_is_cloned_from_nothing(service):
    assert not service.clone("unknown", "child")
    assert service.token_ids("child") is None


async def test_the_least_recently_used_states_go_first(mapper):
    service = MappingService(mapper, RenderWorkers(), budget_bytes=0)
    prompt = ChatPrompt(messages=[{"role": "user", "content": "x" * 100}])
    await service.map("a", prompt)
    assert service.token_ids("a") is None
    assert service.size_bytes == 0
    await service.close()
    measured = MappingService(mapper, RenderWorkers())
    await measured.map("a", prompt)
    roomy = MappingService(mapper, RenderWorkers(), budget_bytes=measured.size_bytes * 5 // 2)
    await measured.close()
    for key in ("a", "b", "c", "b", "d"):
        await roomy.map(key, prompt)
    kept = [key for key in "abcd" if roomy.token_ids(key) is not None]
    assert kept == ["b", "d"]
    await roomy.close()


async def test_a_forgotten_context_is_gone(service):
    await service.map("c", ChatPrompt(messages=[{"role": "user", "content": "x"}]))
    service.forget("c")
    assert service.token_ids("c") is None
    assert service.size_bytes == 0


async def test_plain_prompts_and_messages_requests_are_mapped_like_the_mapper_maps_them(mapper, service):
    words = "a word " * INLINE_CHARS
    for prompt in (PlainPrompt("short"), PlainPrompt(words), PlainPrompt([1, 2, 3])):
        assert (await service.map("c", prompt)).token_ids == mapper.map_plain(prompt).token_ids
    body = {"system": "s", "messages": [{"role": "user", "content": "q"}], "thinking": {"type": "disabled"}}
    prompt = MessagesPrompt.from_body(body)
    mapped, alone = await service.map("c", prompt), mapper.map_converted(prompt)
    assert (mapped.token_ids, mapped.message_ends) == (alone.token_ids, alone.message_ends)
    assert service.token_ids("c") == mapped.token_ids


class CountedWorkers(RenderWorkers):
    def __init__(self):
        super().__init__()
        self.num_renders = 0

    async def render(self, source, given):
        self.num_renders += 1
        return await super().render(source, given)


async def test_short_prompts_need_no_process_once_the_template_has_come_to_its_end_in_one(mapper):
    workers = CountedWorkers()
    service = MappingService(mapper, workers)
    try:
        for seed in range(4):
            prompt = prompts(seed, 1)[0]
            assert comparable(await service.map(f"c{seed}", prompt)) == comparable(mapper.map(prompt))
        assert workers.num_renders == 1
        long = ChatPrompt(messages=[{"role": "user", "content": "word " * 5_000}])
        assert comparable(await service.map("long", long)) == comparable(mapper.map(long))
        assert workers.num_renders == 2
    finally:
        await service.close()


async def test_what_is_known_needs_no_room_and_what_is_new_does(mapper):
    backlog = MappingBacklog(max_chars=10 * INLINE_CHARS)
    service = MappingService(mapper, RenderWorkers(), backlog=backlog)
    long = [{"role": "user", "content": "word " * INLINE_CHARS}]
    size = len(long[0]["content"])
    try:
        known = await service.map("known", ChatPrompt(messages=long), size)
        assert backlog.waiting_chars == 0
        with backlog.room() as others:
            others.take(9 * INLINE_CHARS)
            grown = ChatPrompt(messages=[*long, {"role": "assistant", "content": "ok"}])
            mapped = await service.map("known", grown, size)
            assert mapped.num_kept_tokens >= known.message_ends[-1] - 1
            for prompt in (ChatPrompt(messages=long), PlainPrompt("word " * INLINE_CHARS)):
                with pytest.raises(Unmappable, match="wait to be mapped"):
                    await service.map("new", prompt, size)
            short = ChatPrompt(messages=[{"role": "user", "content": "short"}])
            assert comparable(await service.map("short", short, 30)) == comparable(mapper.map(short))
            # More text than the body had (a conversation that the engine keeps) counts, too.
            with pytest.raises(Unmappable, match="wait to be mapped"):
                await service.map("chained", ChatPrompt(messages=long), 100)
        assert backlog.waiting_chars == 0
        again = ChatPrompt(messages=long)
        assert comparable(await service.map("new", again, size)) == comparable(mapper.map(again))
    finally:
        await service.close()


async def test_a_body_that_no_context_holds_is_not_even_rendered(mapper):
    workers = CountedWorkers()
    service = MappingService(mapper, workers)
    with pytest.raises(Unmappable, match="more than any"):
        await service.map("c", ChatPrompt(messages=[]), MAX_BYTES_PER_CHAR * MAX_CHARS + MAX_BYTES_PER_CHAR)
    assert not workers.num_renders
    await service.close()
