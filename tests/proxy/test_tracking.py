"""A call's lifecycle: whose it is, what it computed, what the cache showed of it, and what is freed."""

from pathlib import Path

from lifecycle.core.directives import Reclaim
from lifecycle.core.events import CallEnded
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import CallEnd, DirectiveOutcome
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
