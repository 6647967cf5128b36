"""The embedded engine's cache passes the suite that LMCache passes, and says what it cannot do."""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count

import msgspec
import pytest

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.drivers.sim import NO_L2, PINS_OFF, SimCache
from engine_bridge.sim.clock import RealClock
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.hardware import INSTANT, EngineConfig
from engine_bridge.sim.requests import SimRequest
from engine_bridge.sim.runner import EngineRunner
from lifecycle.core.directives import Pin
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.vocabulary import DirectiveOutcome, Tier
from tests.conformance.test_cache_control import CacheControlSuite, demote, execute, reclaim

MODEL = "tiny"
CHUNK = 64
POLLS = 5_000
CONFIG = EngineConfig(
    hardware=INSTANT,
    block_tokens=16,
    chunk_tokens=CHUNK,
    l1_bytes=4_000_000_000,
    l2_bytes=4_000_000_000,
    write_back_delay_ns=1_000_000,
)
_CHANCE = random.Random(7)


@dataclass
class StoredChain:
    token_ids: Sequence[int]
    keys: list[bytes]


class SimSubject:
    """The embedded engine, for the suite."""

    def __init__(self, runner: EngineRunner, control: SimCache) -> None:
        self.control = control
        self.namespace = Namespace(model=MODEL)
        self.has_lower_tier = runner.engine.config.l2_bytes > 0
        self.runner = runner
        self._numbers = count()

    async def store(self, num_chunks: int, after: StoredChain | None = None, salt: str = "") -> StoredChain:
        start = [] if after is None else list(after.token_ids)
        tokens = array("I", start + [_CHANCE.randrange(8192) for _ in range(num_chunks * CHUNK - len(start))])
        request = SimRequest(
            request_id=str(next(self._numbers)), token_ids=tokens, output_ids=array("I", [1]), salt=salt
        )
        async with aclosing(self.runner.generate(request)) as outputs:
            async for _ in outputs:
                pass
        keys = split_keys(chunk_keys(tokens, CHUNK))
        wanted = {Tier.L1, Tier.L2} if self.has_lower_tier else {Tier.L1}
        for _ in range(POLLS):
            if all(tiers >= wanted for tiers in self.runner.locate(salt, keys)):
                return StoredChain(tokens.tolist(), keys)
            await asyncio.sleep(0.001)
        raise AssertionError(f"{len(keys)} chunks did not reach {sorted(wanted)}")


@asynccontextmanager
async def subject_of(config: EngineConfig, *, l2_pins: bool) -> AsyncIterator[SimSubject]:
    runner = EngineRunner(SimEngine(config), RealClock())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(runner.run())
        control = SimCache(runner, MODEL, l2_pins=l2_pins)
        assert (await control.self_test()).ok
        yield SimSubject(runner, control)
        running.cancel()


class TestWithL2AndPins(CacheControlSuite):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[SimSubject]:
        async with subject_of(CONFIG, l2_pins=True) as subject:
            yield subject

    async def test_a_pin_held_anew_for_other_chunks_lets_go_of_the_old(self, subject: SimSubject) -> None:
        chain = await subject.store(3)
        for end in (3, 1):
            pin = Pin(
                directive_id="p",
                namespace=subject.namespace,
                reason="test",
                keys=b"".join(chain.keys[:end]),
                pin_id="one",
                lease_until_ns=1 << 62,
            )
            await execute(subject, pin)
        result = await execute(subject, reclaim(subject, chain.keys))
        assert (result.applied, result.skipped) == (2, 1)

    async def test_a_salt_has_chunks_of_its_own(self, subject: SimSubject) -> None:
        chain = await subject.store(2)
        await subject.store(2, after=chain, salt="tenant")
        await execute(subject, reclaim(subject, chain.keys))
        salted = await subject.control.locate(Namespace(model=MODEL, salt="tenant"), chain.keys)
        assert [each.tiers for each in salted] == [frozenset({Tier.L1, Tier.L2})] * 2

    async def test_another_model_is_refused_by_name(self, subject: SimSubject) -> None:
        chain = await subject.store(1)
        other = msgspec.structs.replace(reclaim(subject, chain.keys), namespace=Namespace(model="large"))
        result = await execute(subject, other)
        assert (result.outcome, "large" in result.reason) == (DirectiveOutcome.REJECTED, True)
        [found] = await subject.control.locate(Namespace(model="large"), chain.keys)
        assert not found.tiers


class TestWithL1Alone(CacheControlSuite):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[SimSubject]:
        async with subject_of(msgspec.structs.replace(CONFIG, l2_bytes=0), l2_pins=True) as subject:
            yield subject

    async def test_it_says_that_there_is_no_l2(self, subject: SimSubject) -> None:
        assert subject.control.capabilities.unsupported["pin"] == NO_L2


async def test_pins_are_off_unless_asked_for() -> None:
    async with subject_of(CONFIG, l2_pins=False) as subject:
        assert subject.control.capabilities.unsupported == {"pin": PINS_OFF, "unpin": PINS_OFF}


async def test_the_self_test_tells_sizes_and_leaves_nothing() -> None:
    async with subject_of(CONFIG, l2_pins=False) as subject:
        again = await subject.control.self_test()
        assert (again.ok, again.chunk_size, again.bytes_per_token) == (True, CHUNK, INSTANT.bytes_per_token)
        await subject.store(1)
        assert subject.runner.stats().tiers[Tier.L1].num_chunks == 1


async def test_nothing_is_deleted_before_the_self_test() -> None:
    async with subject_of(CONFIG, l2_pins=False) as subject:
        chain = await subject.store(1)
        subject.control = SimCache(subject.runner, MODEL)
        for directive in (reclaim(subject, chain.keys), demote(subject, chain.keys)):
            result = await execute(subject, directive)
            assert (result.outcome, result.applied) == (DirectiveOutcome.REJECTED, 0)
