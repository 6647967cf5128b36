"""The followed compaction works by the wire alone, on any deployment that enforces."""

import pytest

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Mode
from proxy.demo.compaction import CompactedAgent
from proxy.demo.watch import Watch
from tests.proxy.demo.small import backend


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.BYPASS])
async def test_steps_tell_what_was_seen(mode: Mode) -> None:
    async with backend().deployed(mode, 100_000) as deployed:
        await deployed.up.runtime.prepared.wait()
        watch = Watch(deployed.up.runtime, Namespace(deployed.model_name), deployed.seconds)
        agent = CompactedAgent(
            deployed.up, deployed.model_name, watch, num_looks=100 if mode is Mode.ENFORCE else 1
        )
        steps = await agent.steps()
    seen = [(step.alive, step.dead, step.gone) for step in steps]
    if mode is Mode.BYPASS:
        assert set(seen) == {(0, 0, 0)}
    else:
        assert [step.alive + step.dead + step.gone for step in steps] == [steps[0].alive] * 5
        assert seen[-1][2] > seen[-1][0] > 0
