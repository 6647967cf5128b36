"""The engine in an event loop: streams, aborts by closing, control at the clock's time."""

import asyncio
import contextlib

import pytest

from engine_bridge.sim.clock import RealClock, VirtualClock, run_virtual
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.requests import AbortedOutput, FinishedOutput, TokenOutput
from engine_bridge.sim.runner import EngineRunner
from lifecycle.vocabulary import Tier
from tests.engine_bridge.sim.toy_engine import config, drain, keys_of, request

BOTH = frozenset({Tier.L1, Tier.L2})


@contextlib.asynccontextmanager
async def running(clock, **changes):
    runner = EngineRunner(SimEngine(config(**changes)), clock)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(runner.run())
        yield runner
        task.cancel()


async def outputs_of(runner, asked):
    return [each async for each in runner.generate(asked)]


def test_a_stream_is_what_the_engine_says_at_the_time_it_says_it():
    async def main():
        async with running(VirtualClock()) as runner:
            seen = []
            async for output in runner.generate(request("r", range(8), 3)):
                seen.append((output, runner.clock.now_ns()))
            return seen

    engine = SimEngine(config())
    engine.submit(request("r", range(8), 3), 0)
    seen = run_virtual(main())
    assert [output for output, _ in seen] == drain(engine)
    assert all(output.at_ns == at_ns for output, at_ns in seen)


def test_a_virtual_run_is_the_same_each_time():
    async def main():
        async with running(VirtualClock()) as runner:

            async def agent(number):
                await asyncio.sleep(number / 1e6)
                return await outputs_of(runner, request(f"r{number}", range(number, number + 24), 5))

            return await asyncio.gather(*(agent(number) for number in range(10)))

    assert run_virtual(main()) == run_virtual(main())


async def test_requests_run_side_by_side_on_a_real_clock():
    async with running(RealClock()) as runner:
        asked = [request(f"r{number}", range(number, number + 20), 4) for number in range(8)]
        streams = await asyncio.gather(*(outputs_of(runner, each) for each in asked))
    for each, outputs in zip(asked, streams, strict=True):
        assert [output.token_id for output in outputs[:-1]] == list(each.output_ids)
        assert isinstance(outputs[-1], FinishedOutput)


async def test_closing_a_stream_aborts_its_request():
    async with running(RealClock(), hardware_step_ns=10_000_000) as runner:
        stream = runner.generate(request("r", range(8), 100))
        assert isinstance(await anext(stream), TokenOutput)
        assert runner.stats().num_running == 1
        await stream.aclose()
        assert runner.stats().num_running == 0


async def test_cancelling_a_reader_aborts_its_request():
    async with running(RealClock(), hardware_step_ns=10_000_000_000) as runner:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outputs_of(runner, request("r", range(8))), 0.05)
        assert runner.stats().num_running == 0


async def test_a_restart_ends_every_stream():
    async with running(RealClock(), hardware_step_ns=10_000_000_000) as runner:
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(outputs_of(runner, request(name, range(8), 2))) for name in ("a", "b")
            ]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            runner.restart_engine()
        assert [type(reader.result()[-1]) for reader in readers] == [AbortedOutput] * 2


async def test_what_cannot_run_is_refused_at_once_and_leaves_nothing():
    async with running(RealClock()) as runner:
        with pytest.raises(ValueError, match="this model"):
            await outputs_of(runner, request("r", range(200)))
        assert await outputs_of(runner, request("r", range(8)))


def test_control_acts_at_the_clocks_time():
    async def main():
        async with running(VirtualClock()) as runner:
            await outputs_of(runner, request("r", range(24)))
            keys = keys_of(range(24))
            await asyncio.sleep(1)
            assert runner.locate("", keys) == [BOTH] * 3
            runner.pin("", keys[:1])
            assert runner.pins("") == {keys[0]: 1}
            assert runner.delete("", keys, BOTH).deleted == tuple(keys[1:])
            runner.restart_cache()
            assert runner.locate("", keys[:1]) == [frozenset({Tier.L2})]
            assert runner.prefetch("", keys) == 1
            await asyncio.sleep(1)
            assert runner.locate("", keys[:1]) == [BOTH]
            runner.unpin("", keys[:1])
            assert runner.delete("", keys, BOTH).deleted == tuple(keys[:1])
            assert runner.reset_prefix_cache()
            assert runner.stats().tiers[Tier.GPU].num_chunks == 0

    run_virtual(main())
