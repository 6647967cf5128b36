"""A call's lifecycle: whose it is, what it computed, what the cache showed of it, and what is freed."""

from pathlib import Path

from lifecycle.core.directives import Reclaim
from lifecycle.core.events import CallEnded, CallMapped
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, Mode, WaitKind
from tests.proxy.whole_proxy import Whole, assistant, lifecycle, system, user, whole_proxy

HEAD = system("you are a toy and answer with few words")
LONG = [HEAD, user("what is the first thing that you can tell me about this"), assistant("ok")]


def reclaimed(it: Whole) -> set[bytes]:
    """Keys that the cache was asked to free."""
    return {key for d in it.cache.asked if isinstance(d, Reclaim) for key in split_keys(d.keys)}


def directives_settled(it: Whole, outcome: DirectiveOutcome, count: int) -> bool:
    records = it.runtime.tracker.contexts.directives.values()
    return sum(r.result is not None and r.result.outcome is outcome for r in records) >= count


async def test_a_replaced_history_leaves_the_cache_and_nothing_else_does(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        before = [*LONG, user("and the second thing, which is a little longer than the first one was")]
        await it.chat(before, lifecycle(ctx="a", call="1"))
        (end,) = await it.events(CallEnded)
        assert end.end is CallEnd.COMPLETED
        assert end.prompt_tokens == len(it.toy.prompts[-1])
        old = set(it.toy.keys(before))
        await it.until(
            lambda: (
                it.runtime.tracker.contexts.index.verified_chunks(
                    it.context("a").namespace, b"".join(it.toy.keys(before))
                )
                == len(old)
            )
        )
        after = [HEAD, user("a summary")]
        results = await it.ops({"op": "replace", "seq": 1, "ctx": "a", "span": [1, 4], "n": 1})
        assert [r["status"] for r in results] == ["applied"]
        await it.until(lambda: directives_settled(it, DirectiveOutcome.APPLIED, 1))
        kept = set(it.toy.keys([HEAD, user("x")])) & old
        assert kept
        assert reclaimed(it) >= old - kept - set(it.toy.keys(after))
        assert not kept & reclaimed(it)
        await it.chat(after, lifecycle(ctx="a", call="2"))
        assert it.toy.hits[-1] >= len(kept) * 16 - 16


async def test_a_context_whose_keys_the_cache_never_shows_is_unmapped(
    tmp_path: Path,
) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.compute = lambda body, text: (1, 0)  # type: ignore[method-assign]
        await it.chat(LONG, lifecycle(ctx="a"))
        await it.until(lambda: bool(it.context("a").unmapped))
        assert "verify" in it.context("a").unmapped
        assert it.runtime.tracker.contexts.index.unmapped_contexts(it.context("a").namespace)


async def test_an_unmapped_model_is_followed_without_tokens(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE) as it:
        body = {"model": "another", "messages": LONG}
        answer = await it.data.post("/v1/chat/completions", json=body, headers=lifecycle(ctx="a"))
        assert answer.headers["x-kv-mapping"] == "none"
        await it.runtime.mailboxes.settled()
        (mapped,) = await it.events(CallMapped)
        assert mapped.reason
        state = it.context("a")
        assert state.unmapped
        assert sum(v.index >= 0 for v in state.versions.values()) == len(LONG)


async def test_what_rode_on_the_call_is_recorded_with_it(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        fields = lifecycle(ctx="a", agent="tester", flow="nightly", tool="pytest", eta=2.5)
        fields["x-kv-lifecycle"] += ', waiting=tool, pin=("0:2";ttl=60)'
        await it.chat(LONG, fields)
        state = it.context("a")
        assert (state.agent, state.flow) == ("tester", "nightly")
        assert (state.wait, state.wait_tool, state.wait_eta) == (WaitKind.TOOL, "pytest", 2.5)
        (pin,) = state.pins
        assert pin.index == 1
        await it.until(lambda: bool(it.cache.holds))
        await it.chat([*LONG, assistant("ok"), user("bye")], {"x-kv-lifecycle": 'ctx="a", close'})
        assert it.context("a").closed
        assert it.context("a").pins


async def test_a_fork_in_a_call_shares_its_parents_chunks_until_both_are_gone(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LONG, lifecycle(ctx="p"))
        child = [*LONG, assistant("ok"), user("only the child says this, and it says it at some length")]
        await it.chat(child, lifecycle(ctx="c", parent="p", fork_at=3))
        namespace = it.context("p").namespace
        index = it.runtime.tracker.contexts.index
        for words in (LONG, child):
            run = b"".join(it.toy.keys(words))
            await it.until(lambda run=run: index.verified_chunks(namespace, run) * 32 == len(run))  # type: ignore[misc]
        await it.ops({"op": "close", "seq": 1, "ctx": "p"})
        await it.ops({"op": "waiting", "seq": 1, "ctx": "c", "kind": "human"})
        assert not set(it.toy.keys(child)) & reclaimed(it)
        await it.ops({"op": "close", "seq": 2, "ctx": "c"})
        await it.until(lambda: set(it.toy.keys(child)) <= reclaimed(it))
        await it.until(lambda: not set(it.toy.keys(child)) & set(it.cache.chunks))


async def test_what_a_call_generated_is_freed_with_it(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: "an answer of a good many tokens, which fill chunks of their own " * 2
        await it.chat(LONG, lifecycle(ctx="a"), stream=True, stream_options={"include_usage": True})
        prompt = set(it.toy.keys(LONG))
        await it.until(lambda: any(v.index < 0 and v.keys for v in it.context("a").versions.values()))
        generated = set(it.cache.chunks) - prompt
        assert len(generated) > 5
        index = it.runtime.tracker.contexts.index
        namespace = it.context("a").namespace
        await it.until(lambda: not index.unproven(namespace, b"".join(generated)))
        await it.ops({"op": "close", "seq": 1, "ctx": "a"})
        await it.until(lambda: generated <= reclaimed(it))
