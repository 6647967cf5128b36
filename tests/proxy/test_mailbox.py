"""Jobs of one key in order, keys side by side, and nothing that stops either."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from proxy.mailbox import Mailboxes
from proxy.request_record import RequestRecord, current_request, run_for
from proxy.tasks import owned_tasks


def test_jobs_of_a_key_run_in_order_and_keys_do_not_wait_for_each_other() -> None:
    async def run() -> None:
        done: list[str] = []
        gate = asyncio.Event()

        async def slow() -> None:
            await gate.wait()
            done.append("slow")

        async def note(what: str) -> None:
            done.append(what)

        async with owned_tasks() as tasks:
            boxes = Mailboxes(tasks)
            boxes.post("a", slow)
            boxes.post("a", lambda: note("behind"))
            boxes.post("b", lambda: note("beside"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert done == ["beside"]
            gate.set()
            await boxes.settled()
        assert done == ["beside", "slow", "behind"]

    asyncio.run(run())


def test_a_job_that_fails_does_not_stop_its_key() -> None:
    async def run() -> None:
        done: list[int] = []

        async def fail() -> None:
            raise RuntimeError("a bug")

        async def note() -> None:
            done.append(1)

        async with owned_tasks() as tasks:
            boxes = Mailboxes(tasks)
            boxes.post("a", fail)
            boxes.post("a", note)
            await asyncio.wait_for(boxes.settled(), 5)
            boxes.post("a", note)
            await asyncio.wait_for(boxes.settled(), 5)
        assert done == [1, 1]

    asyncio.run(run())


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=30,
    )
)
def test_a_job_runs_behind_all_that_was_posted_before_under_either_key(
    posts: list[tuple[int, int | None, int]],
) -> None:
    async def run() -> None:
        done: list[int] = []

        async def job(number: int, hops: int) -> None:
            for _ in range(hops):
                await asyncio.sleep(0)
            done.append(number)

        async with owned_tasks() as tasks:
            boxes = Mailboxes(tasks)
            for number, (key, behind, hops) in enumerate(posts):
                boxes.post(key, lambda n=number, h=hops: job(n, h), behind)  # type: ignore[misc]
            await asyncio.wait_for(boxes.settled(), 5)
        assert sorted(done) == list(range(len(posts)))
        for number, (key, behind, _) in enumerate(posts):
            for earlier in range(number):
                if posts[earlier][0] in (key, behind):
                    assert done.index(earlier) < done.index(number)

    asyncio.run(run())


def test_each_job_runs_for_the_request_that_it_was_posted_for() -> None:
    async def run() -> None:
        seen: list[str] = []

        async def note() -> None:
            request = current_request()
            seen.append(request.id if request is not None else "")

        async with owned_tasks() as tasks:
            boxes = Mailboxes(tasks)
            for number in range(3):
                run_for(RequestRecord(f"r{number}"))
                boxes.post("a", note)
                boxes.post("b", note, behind="a")
            run_for(None)
            boxes.post("a", note)
            await boxes.settled()
        assert sorted(seen) == ["", "r0", "r0", "r1", "r1", "r2", "r2"]
        assert [each for each in seen if each][:2] == ["r0", "r1"]

    asyncio.run(run())
