"""A compaction that the engine makes ends what it sums up, as if its agent had said so."""

from pathlib import Path
from typing import Any

import pytest

from lifecycle.core.events import CallEnded, OperationApplied, UntrackedForwarded
from lifecycle.core.observations import ReplaceMessages
from lifecycle.vocabulary import CallEnd
from tests.proxy.test_api_lives import LONG, keys_of, post, until_freed, until_proven
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Whole, lifecycle, whole_proxy

COMPACT = "/v1/responses/compact"


async def answered(it: Whole) -> tuple[str, str, list[bytes]]:
    """A response's id, its context, and the keys of its prompt, proven."""
    body = {"input": LONG}
    first = await post(it, "/v1/responses", {}, **body)
    context, keys = first.headers["x-kv-context"], keys_of(it, body)
    await until_proven(it, context, keys)
    return first.json()["id"], context, keys


@pytest.mark.parametrize("named", ["by its response", "by its list", "by its name"])
async def test_what_was_summed_up_is_replaced(tmp_path: Path, named: str) -> None:
    async with whole_proxy(tmp_path) as it:
        response_id, context, keys = await answered(it)
        said = {"role": "assistant", "content": "ok"}
        asks: dict[str, dict[str, Any]] = {
            "by its response": {"previous_response_id": response_id},
            "by its list": {"input": [{"role": "user", "content": LONG}, said]},
            "by its name": {"input": "anything"},
        }
        headers = lifecycle(ctx=context) if named == "by its name" else {}
        answer = await post(it, COMPACT, headers, **asks[named])
        assert answer.headers["x-kv-context"] != context, "it is no call of the context"
        await it.until(lambda: "compaction" in it.context(context).sources)
        [applied] = [e.operation for e in await it.events(OperationApplied)]
        assert isinstance(applied, ReplaceMessages)
        assert (applied.ctx, applied.span, applied.n) == (context, (0, 1), 2)
        assert not await it.events(UntrackedForwarded)
        assert keys


async def test_an_engine_that_cannot_compact_changes_nothing(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.compacts = False
        response_id, context, keys = await answered(it)
        body = {"model": NAME, "previous_response_id": response_id}
        refused = await it.data.post(COMPACT, json=body)
        assert (refused.status_code, refused.json()) == (404, {"detail": "Not Found"})
        await it.runtime.mailboxes.settled()
        assert [end.end for end in await it.events(CallEnded)] == [CallEnd.COMPLETED, CallEnd.FAILED]
        assert not await it.events(OperationApplied)
        await it.ops({"op": "close", "seq": 1, "ctx": context})
        await until_freed(it, keys)


async def test_a_compaction_of_nothing_we_know_is_forwarded(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        answer = await post(it, COMPACT, {}, input="something else")
        assert answer.json()["object"] == "response.compaction"
        assert answer.headers["x-kv-mapping"] == "none"
        assert not await it.events(OperationApplied)
