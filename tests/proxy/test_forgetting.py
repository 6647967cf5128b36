"""What a context that is over held for its next call is let go; what is pinned is kept."""

import asyncio
from pathlib import Path

from lifecycle.core.events import ContextClosed, PinReleased
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Whole, lifecycle, system, user, whole_proxy

LIST = [system("You are an agent with many rules to follow. " * 4), user("go on")]


def held(it: Whole) -> int:
    service = it.runtime.models[NAME].service
    assert service is not None
    return service.size_bytes


async def test_a_context_that_is_over_holds_nothing_for_a_next_call(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert (await it.chat(LIST, lifecycle(ctx="stays"))).status_code == 200
        one = held(it)
        assert one > 0
        assert (await it.chat([*LIST, user("and on")], lifecycle(ctx="ends"))).status_code == 200
        assert held(it) > one
        await it.ops({"op": "close", "seq": 1, "ctx": "ends"})
        await it.until(lambda: not it.context("ends").open)
        assert held(it) == one
        assert (await it.chat([*LIST, user("again")], lifecycle(ctx="stays"))).status_code == 200
        assert it.context("stays").open


async def test_a_pinned_context_keeps_its_tokens_until_the_pin_is_let_go(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert (await it.chat(LIST, lifecycle(ctx="c", call="1"))).status_code == 200
        await it.ops({"op": "pin", "seq": 1, "ctx": "c", "span": "system", "ttl": 60})
        await it.ops({"op": "close", "seq": 2, "ctx": "c"})
        assert await it.events(ContextClosed)
        assert it.context("c").pins
        assert held(it) > 0
        await it.ops({"op": "unpin", "seq": 3, "ctx": "c", "span": "system"})
        assert await it.events(PinReleased)
        assert held(it) == 0


async def test_calls_that_come_at_once_to_a_new_context_leave_nothing_either(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        calls = [lifecycle(ctx="new", call=str(number)) for number in range(4)]
        await asyncio.gather(*(it.chat(LIST, fields) for fields in calls))
        await it.runtime.mailboxes.settled()
        assert len(it.context("new").attempts) == len(calls)
        lint = it.runtime.tracking._mapper._lint
        assert held(it) > 0
        assert lint.size_bytes > 0
        await it.ops({"op": "close", "seq": 1, "ctx": "new"})
        await it.until(lambda: not it.context("new").open)
        assert held(it) == 0
        assert lint.size_bytes == 0
