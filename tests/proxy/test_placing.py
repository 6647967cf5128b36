"""Contexts stay where their KV is, over forks, restarts, drains and crashes, and the log says where."""

import asyncio
from pathlib import Path

from lifecycle.core.events import CallArrived, CallEnded
from lifecycle.core.ids import Namespace
from lifecycle.core.observations import CallArrival
from lifecycle.vocabulary import IdentityRung
from proxy.affinity import OVERLOAD_FLOOR, ranked
from tests.proxy.several_engines import Several, several_engines
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Message, assistant, lifecycle, system, user

LIST = [system("you are a toy"), user("something that is long enough to fill some chunks")]


def longer(messages: list[Message], text: str) -> list[Message]:
    return [*messages, assistant("ok"), user(text)]


def home(name: str) -> str:
    """Where a new context belongs, by its name alone."""
    return ranked(f"default/{name}", ["a", "b"])[0]


async def lives(it: Several, name: str, calls: int = 3) -> list[str]:
    """Engines that answered a context's calls."""
    messages, seen = LIST, []
    for n in range(calls):
        seen.append(await it.served(messages, lifecycle(ctx=name, call=f"{name}-{n}")))
        messages = longer(messages, f"{name} {n}")
    return seen


async def test_contexts_stick_and_are_spread(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for n in range(8):
            assert await lives(it, f"run-{n}") == [home(f"run-{n}")] * 3
        assert {home(f"run-{n}") for n in range(8)} == {"a", "b"}
        arrivals = [e for e in await it.events(CallArrived) if e.call_id.startswith("run-3")]
        assert {e.backend for e in arrivals} == {home("run-3")}
        assert [e.placed for e in arrivals] == ["by its root", "", ""]
        assert it.context("run-3").backend == home("run-3")


async def test_forks_go_with_their_parents_and_their_forks_too(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for n in range(4):
            (place,) = await lives(it, f"p{n}", calls=1)
            for child, parent in ((f"c{n}", f"p{n}"), (f"d{n}", f"c{n}")):
                messages = longer(LIST, child)
                headers = lifecycle(ctx=child, parent=parent, fork_at=2)
                assert await it.served(messages, headers) == place
        forks = [e for e in await it.events(CallArrived) if e.placed == "with its parent"]
        assert len(forks) == 8


async def test_forks_meet_again_where_their_family_goes_when_its_engine_is_dead(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    async with several_engines(tmp_path, names) as it:
        (place,) = await lives(it, "family", calls=1)
        left = [name for name in names if name != place]
        await it.engines[place].kill()
        (next_best, *_) = ranked("default/family", left)
        for n in range(6):
            # As it looks before anybody has found out.
            it.runtime.backends.bring_back(it.backend(place))
            headers = lifecycle(ctx=f"fork-{n}", parent="family", fork_at=2)
            assert await it.served(longer(LIST, str(n)), headers) == next_best


async def test_a_fork_leaves_a_parent_that_is_far_too_busy(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        (place,) = await lives(it, "parent", calls=1)
        it.backend(place).load += 4 * OVERLOAD_FLOOR
        other = await it.served(longer(LIST, "x"), lifecycle(ctx="child", parent="parent", fork_at=2))
        assert other != place
        it.backend(place).load -= 4 * OVERLOAD_FLOOR
        messages = longer(longer(LIST, "x"), "y")
        assert await it.served(messages, lifecycle(ctx="child")) == other, "its KV lies there now"
        assert await it.served(longer(LIST, "z"), lifecycle(ctx="parent")) == place


async def test_one_offs_go_where_least_is_to_do(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for busy, free in (("a", "b"), ("b", "a")):
            it.backend(busy).load += 1
            for n in range(3):
                assert await it.served([user(f"{busy} {n}")], lifecycle(one_off=True)) == free
            it.backend(busy).load -= 1


async def test_after_a_restart_everything_is_where_it_was(tmp_path: Path) -> None:
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    async with several_engines(tmp_path, log_url=log_url) as it:
        (place,) = await lives(it, "parent", calls=1)
        it.backend(place).load += 4 * OVERLOAD_FLOOR
        moved = await it.served(longer(LIST, "x"), lifecycle(ctx="child", parent="parent", fork_at=2))
    async with several_engines(tmp_path, log_url=log_url) as it:
        assert await it.served(longer(LIST, "z"), lifecycle(ctx="parent")) == place
        assert await it.served(longer(longer(LIST, "x"), "y"), lifecycle(ctx="child")) == moved


async def test_who_drains_loses_its_contexts_at_their_next_call_and_gets_no_new_ones(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        (place,) = await lives(it, "mover", calls=1)
        it.backend(place).draining = True
        other = "b" if place == "a" else "a"
        assert await it.served(longer(LIST, "x"), lifecycle(ctx="mover")) == other
        assert [await lives(it, f"new-{n}", calls=1) for n in range(4)] == [[other]] * 4
        (moved,) = [e for e in await it.events(CallArrived) if "takes no calls" in e.placed]
        assert moved.backend == other
        it.backend(place).draining = False
        assert await it.served(longer(longer(LIST, "x"), "y"), lifecycle(ctx="mover")) == other


async def test_a_call_that_another_engine_took_is_recorded_so(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        (place,) = await lives(it, "survivor", calls=1)
        other = "b" if place == "a" else "a"
        await it.engines[place].kill()
        # The engine may have been found gone before the call came, or by the call itself.
        assert await it.served(longer(LIST, "x"), lifecycle(ctx="survivor", call="after")) == other
        assert it.context("survivor").backend == other
        (arrived,) = [e for e in await it.events(CallArrived) if e.call_id == "after"]
        (ended,) = [e for e in await it.events(CallEnded) if e.call_id == "after"]
        assert (arrived.backend, ended.backend) in ((place, other), (other, ""))
        await it.engines[place].revive()
        await it.until_seen(lambda: not it.backend(place).down)
        assert await it.served(longer(longer(LIST, "x"), "y"), lifecycle(ctx="survivor")) == other


async def test_what_the_log_says_later_counts_more_than_what_we_did_before(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        (place,) = await lives(it, "shared", calls=1)
        other = "b" if place == "a" else "a"
        # As another proxy on the same log would record it.
        arrival = CallArrival(at_ns=1, call_id="theirs", head=b"h", messages=(), backend=other)
        await it.runtime.tracker.observe(it.context("shared").uid, arrival)
        assert await it.served(longer(LIST, "x"), lifecycle(ctx="shared")) == other


async def test_with_nobody_there_the_client_reads_why(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for engine in it.engines.values():
            await engine.kill()
        answer = await it.chat(LIST, lifecycle(ctx="lost"))
        assert answer.status_code == 502
        assert answer.json()["error"]["type"] == "kvtether_upstream_unreachable"


async def test_what_is_bypassed_goes_where_its_context_belongs(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        it.runtime.modes.bypass_all = True
        for n in range(4):
            for _ in range(2):
                before = {name: len(engine.calls()) for name, engine in it.engines.items()}
                await it.chat(LIST, lifecycle(ctx=f"run-{n}"))
                went = [n for n, engine in it.engines.items() if len(engine.calls()) > before[n]]
                assert went == [home(f"run-{n}")]


async def test_concurrent_first_calls_of_a_context_meet(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        calls = [it.served(LIST, lifecycle(ctx="same", call=str(n))) for n in range(6)]
        assert set(await asyncio.gather(*calls)) == {home("same")}


async def test_a_spawned_context_is_placed_by_its_own_name(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        await lives(it, "parent", calls=1)
        for n in range(6):
            headers = lifecycle(ctx=f"sub-{n}", parent="parent")
            assert await it.served([user(f"task {n}")], headers) == home(f"sub-{n}")
        state = it.context("sub-0")
        assert (state.rung, state.forked) == (IdentityRung.EXPLICIT, False)


async def test_with_one_engine_the_log_says_nothing_of_it(tmp_path: Path) -> None:
    async with several_engines(tmp_path, ("only",)) as it:
        answer = await it.chat(LIST, lifecycle(ctx="c"))
        assert "x-kv-backend" not in answer.headers
        assert it.context("c").backend == ""
        (arrived,) = await it.events(CallArrived)
        assert (arrived.backend, arrived.placed) == ("", "")
        assert it.context("c").namespace != Namespace("")


PROMPTS = [f"a prompt of its own, number {n}" for n in range(8)]


async def completed(it: Several) -> str:
    """Which engine took a request of several prompts, each a context of its own."""
    answer = await it.data.post("/v1/completions", json={"model": NAME, "prompt": PROMPTS})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kv-backend"]


async def ended(it: Several, number: int) -> list[CallEnded]:
    """Ends that the log holds, once there are so many."""
    await it.runtime.mailboxes.settled()
    found = await it.events(CallEnded)
    assert len(found) == number
    return found


async def test_all_prompts_of_a_request_are_where_the_request_went(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        taken_by = await completed(it)
        await ended(it, len(PROMPTS))
        arrivals = await it.events(CallArrived)
        assert [e.backend for e in arrivals] == [taken_by] * len(PROMPTS)
        assert [e.placed for e in arrivals[1:]] == ["with its request's first prompt"] * (len(PROMPTS) - 1)
        states = it.runtime.tracker.contexts.states.values()
        assert [state.backend for state in states] == [taken_by] * len(PROMPTS)


async def test_all_prompts_of_a_request_follow_it_to_another_engine(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        place = await completed(it)
        await ended(it, len(PROMPTS))
        await it.engines[place].kill()
        other = await completed(it)
        assert other != place
        last = await ended(it, 2 * len(PROMPTS))
        arrivals = (await it.events(CallArrived))[len(PROMPTS) :]
        # The engine may have been found gone before the request came, or by the request itself.
        told = [(at.backend, by.backend) for at, by in zip(arrivals, last[len(PROMPTS) :], strict=True)]
        assert set(told) in ({(place, other)}, {(other, "")})
