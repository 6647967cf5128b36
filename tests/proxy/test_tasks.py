"""Background work fails alone, and ends with its owner."""

import asyncio

import pytest

from proxy.tasks import Tasks, owned_tasks


async def test_a_failing_task_takes_nobody_with_it() -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    done = asyncio.Event()

    async def work() -> None:
        done.set()

    async with owned_tasks() as tasks:
        await tasks.spawn(fail())
        tasks.spawn(work())
        await asyncio.wait_for(done.wait(), 5)


async def test_a_loop_starts_again_until_it_returns() -> None:
    runs = 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        if runs < 2:
            raise RuntimeError("a bug")

    async with owned_tasks() as tasks:
        await asyncio.wait_for(tasks.keep(loop), 5)
    assert runs == 2


async def test_what_still_runs_ends_with_the_owner() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with owned_tasks() as tasks:
        tasks.spawn(forever())
        tasks.keep(forever)
        await asyncio.sleep(0)
    assert ended == [True, True]


async def test_what_the_owner_raises_is_not_wrapped() -> None:
    async def owner() -> None:
        async with owned_tasks() as tasks:
            tasks.keep(asyncio.Event().wait)  # type: ignore[arg-type]
            await asyncio.sleep(0)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await owner()


async def test_a_result_can_be_waited_for() -> None:
    async def answer() -> int:
        return 7

    async with owned_tasks() as tasks:
        assert isinstance(tasks, Tasks)
        assert await tasks.run(answer()) == 7
