"""What agents declare, over the wire: a verdict for each operation, in order, once, only for one's own."""

import asyncio
import json
from pathlib import Path

import pytest

from lifecycle.core.events import CallEnded, ListEdited, OperationApplied
from lifecycle.errors import LogUnavailable
from tests.lifecycle.lives import GatedLog
from tests.proxy.api_keys import bearer, keys
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import Whole, assistant, lifecycle, user, whole_proxy

OPS = "/kv/v1/ops"
LIST = [user("one"), assistant("ok"), user("two")]


def statuses(results: list[dict[str, object]]) -> list[object]:
    return [r["status"] for r in results]


async def priced(it: Whole, op: dict[str, object], query: str = "?dry_run=1") -> dict[str, object]:
    """What one operation would cost."""
    body = {"source": "s", "ops": [{"seq": 1, "ctx": "a", **op}]}
    answer = await it.data.post(OPS + query, json=body)
    assert answer.status_code == 200
    [result] = answer.json()["results"]
    return dict(result)


@pytest.mark.parametrize("span", [[1, 2], [1, 3], [3, 4], [0, 1]])
async def test_a_dry_run_tells_what_must_be_computed_again_and_records_nothing(
    tmp_path: Path, span: list[int]
) -> None:
    messages = [user(f"{n} is the number of this message, which fills some chunks") for n in range(4)]
    async with whole_proxy(tmp_path) as it:
        await it.chat(messages, lifecycle(ctx="a", call="1"))
        position = it.runtime.tracker.contexts.position
        price = await priced(it, {"op": "remove", "span": span})
        assert await priced(it, {"op": "replace", "span": span, "n": 2}) == price
        assert price["seq"] == 1
        left = messages[: span[0]] + messages[span[1] :]
        await it.chat(left, lifecycle(ctx="b"))
        generation_prompt = len(it.toy.tokens([]))
        computed = len(it.toy.prompts[-1]) - it.toy.hits[-1] - generation_prompt
        # The role that both lists go on with may fill the chunk that the edit falls into.
        assert price["prefill_tokens"] in (computed, computed + CHUNK)
        assert await priced(it, {"op": "append", "n": 3}) == {"seq": 1, "ctx": "a", "prefill_tokens": 0}
        assert await priced(it, {"op": "remove", "span": [9, 10]}, "?dry_run") == {
            "seq": 1,
            "ctx": "a",
            "prefill_tokens": 0,
        }
        assert "prefill_tokens" not in await priced(it, {"op": "close"})
        assert (await priced(it, {"op": "close", "ctx": "nobody"}))["reason"] == "no such context"
        assert "reason" in await priced(it, {"op": "nonsense"})
        assert it.context("a").open
        events = [r.event for r in await it.recorded() if r.position > position]
        assert not [e for e in events if isinstance(e, OperationApplied | ListEdited)]
        assert statuses(await it.ops({"op": "append", "seq": 1, "ctx": "a", "n": 1})) == ["applied"]


async def test_each_operation_gets_its_verdict(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        results = await it.ops(
            {"op": "append", "seq": 1, "ctx": "a", "n": 1},
            {"op": "append", "seq": 1, "ctx": "a", "n": 1},
            {"op": "append", "seq": 3, "ctx": "a", "n": 1},
            {"op": "append", "seq": 2, "ctx": "a", "ids": ["x", "y"]},
            {"op": "one_off", "seq": 4, "ctx": "a"},
            {"op": "append", "seq": 1, "ctx": "nobody", "n": 1},
            {"op": "nonsense", "seq": 5, "ctx": "a"},
            {"op": "pin", "seq": 5, "ctx": "a", "span": [0, 1], "ttl": 10},
            {"op": "waiting", "seq": 6, "ctx": "a", "kind": "human"},
            {"op": "close", "seq": 7, "ctx": "a"},
        )
        assert statuses(results) == [
            "applied",
            "duplicate",
            "held",
            "applied",
            "rejected",
            "rejected",
            "rejected",
            "applied",
            "applied",
            "applied",
        ]
        assert [r["seq"] for r in results] == [1, 1, 3, 2, 4, 1, 5, 5, 6, 7]
        assert all(r["reason"] for r in results if r["status"] == "rejected")
        assert results[7]["granted"].keys() == {"l1", "l2"}
        state = it.context("a")
        assert state.sources["s"].applied == 7
        assert state.closed
        again = await it.ops({"op": "append", "seq": 3, "ctx": "a", "n": 1})
        assert statuses(again) == ["duplicate"]


async def test_forks_spawns_and_one_offs_are_created(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="p"))
        results = await it.ops(
            {"op": "fork", "seq": 1, "ctx": "f", "parent": "p", "upto": 1},
            {"op": "spawn", "seq": 1, "ctx": "s", "parent": "p"},
            {"op": "one_off", "seq": 1, "ctx": "o"},
            {"op": "fork", "seq": 1, "ctx": "g", "parent": "nobody"},
        )
        assert statuses(results) == ["applied"] * 4
        fork, spawn, once, orphan = (it.context(name) for name in "fsog")
        assert fork.forked
        assert sum(v.index >= 0 for v in fork.versions.values()) == 1
        assert not spawn.forked
        assert not spawn.versions
        assert once.one_off
        assert not orphan.forked
        await it.chat([user("sum up")], lifecycle(ctx="o"))
        assert json.loads(it.toy.bodies[-1])["kv_transfer_params"] == {"lmcache.max_offload_tokens": 0}


async def test_a_tenant_reaches_its_own_contexts_only(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        await it.chat(LIST, {**lifecycle(ctx="same name"), **bearer("a")})
        await it.until(lambda: not it.context("same name", "a").flights)
        before = it.context("same name", "a")
        body = {"source": "s", "ops": [{"op": "close", "seq": 1, "ctx": "same name"}]}
        answer = await it.data.post(OPS, json=body, headers=bearer("b"))
        assert statuses(answer.json()["results"]) == ["rejected"]
        after = it.context("same name", "a")
        assert (after.open, after.versions) == (True, before.versions)
        fork = {"source": "s", "ops": [{"op": "fork", "seq": 1, "ctx": "f", "parent": "same name"}]}
        await it.data.post(OPS, json=fork, headers=bearer("b"))
        assert not it.context("f", "b").versions
        answer = await it.data.post(OPS, json=body, headers=bearer("a"))
        assert statuses(answer.json()["results"]) == ["applied"]
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await it.data.post(OPS, json=body, headers=headers)).status_code == 401


async def test_an_operation_sent_after_the_answer_is_decided_behind_the_calls_end(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: "a long answer " * 20
        for n in range(5):
            body = {"model": NAME, "messages": LIST, "stream": bool(n % 2)}
            await it.data.post("/v1/chat/completions", json=body, headers=lifecycle(ctx=f"c{n}"))
            results = await it.ops({"op": "replace", "seq": 1, "ctx": f"c{n}", "span": [0, 3], "n": 1})
            assert statuses(results) == ["applied"]
        events = await it.events(CallEnded, ListEdited)
        assert [type(e) for e in events] == [CallEnded, ListEdited] * 5


async def test_a_fork_sent_after_the_parents_answer_takes_over_that_answers_list(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        body = {"model": NAME, "messages": LIST}
        await it.data.post("/v1/chat/completions", json=body, headers=lifecycle(ctx="p"))
        await it.ops({"op": "fork", "seq": 1, "ctx": "f", "parent": "p"})
        assert sum(v.index >= 0 for v in it.context("f").versions.values()) == len(LIST)
        body["messages"] = [*LIST, assistant("ok"), user("three")]
        await it.data.post("/v1/chat/completions", json=body, headers=lifecycle(ctx="p"))
        fork = lifecycle(ctx="g", parent="p", fork_at=5)
        await it.chat([*body["messages"], assistant("ok"), user("go")], fork)  # type: ignore[misc]
        assert it.context("g").forked
        assert it.runtime.tracker.contexts.index.stats(it.context("g").namespace).live > 0


async def test_operations_ride_on_the_call(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        riding = {"ctx": "a", "source": "s", "ops": [{"op": "replace", "seq": 1, "span": [0, 3], "n": 1}]}
        answer = await it.chat([user("summary"), user("go on")], kv_lifecycle=riding)
        assert "kv_lifecycle" not in json.loads(it.toy.bodies[-1])
        assert "x-kv-lifecycle-error" not in answer.headers
        assert [e.operation.seq for e in await it.events(OperationApplied)] == [1]
        assert it.context("a").sources["s"].applied == 1
        await it.chat([user("summary"), user("go on")], kv_lifecycle=riding)
        assert len(await it.events(OperationApplied)) == 1


async def test_a_call_waits_for_the_operation_that_it_names(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, plan_wait_seconds=1.0) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        calling = asyncio.ensure_future(it.chat([user("summary")], lifecycle(ctx="a", source="s", seq=1)))
        await asyncio.sleep(0.05)
        assert len(it.toy.bodies) == 1
        await it.ops({"op": "replace", "seq": 1, "ctx": "a", "span": [0, 3], "n": 1})
        assert (await calling).status_code == 200
        assert len(it.toy.bodies) == 2
        # An operation that never comes holds nobody for longer than the limit.
        assert (await it.chat([user("summary")], lifecycle(ctx="a", source="s", seq=9))).status_code == 200


async def test_while_the_log_is_away_nothing_is_said_to_be_applied(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.away = LogUnavailable("disk full")
        for op in (
            {"op": "pin", "seq": 1, "ctx": "a", "span": [0, 1]},
            {"op": "spawn", "seq": 1, "ctx": "new"},
        ):
            answer = await it.data.post(OPS, json={"source": "s", "ops": [op]})
            assert answer.status_code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert "retry-after" in answer.headers
        log.away = None
        await it.until(lambda: not it.runtime.tracker.degraded)
        assert statuses(await it.ops({"op": "pin", "seq": 1, "ctx": "a", "span": [0, 1]})) == ["duplicate"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", OPS, b"", 404),
        ("POST", "/kv/v1/nothing", b"{}", 404),
        ("POST", OPS, b"{", 400),
        ("POST", OPS, b'{"ops": []}', 400),
        ("POST", OPS + "?dry_run=1", b'{"ops": []}', 400),
        ("POST", OPS, b'{"source": "s", "ops": [], "x": "' + b"y" * 1_100_000 + b'"}', 413),
    ],
)
async def test_what_cannot_be_read_is_a_problem(
    tmp_path: Path, method: str, path: str, content: bytes, status: int
) -> None:
    async with whole_proxy(tmp_path, ready=False) as it:
        answer = await it.data.request(method, path, content=content)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == status
        assert not it.runtime.tracker.contexts.states


async def many(it: Whole, name: str) -> None:
    for seq in range(1, 20):
        await it.ops({"op": "append", "seq": seq, "ctx": name, "n": 1})


async def test_sources_and_contexts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.ops({"op": "spawn", "seq": 1, "ctx": "a"}, {"op": "spawn", "seq": 1, "ctx": "b"}, source="x")
        await asyncio.gather(many(it, "a"), many(it, "b"))
        assert it.context("a").sources["s"].applied == it.context("b").sources["s"].applied == 19
