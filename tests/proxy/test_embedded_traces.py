"""Made-up agents through the whole proxy before the embedded engine, as recorded ones on the real stack: what
died is gone from the cache, what lives is there, the log knows."""

from pathlib import Path

import pytest

from engine_bridge.sim.traces.generated import Workload, generated
from engine_bridge.sim.traces.selection import Caps, capped
from tests.e2e.traced_agents import (
    Account,
    assert_the_dead_are_gone_and_the_living_are_there,
    assert_the_log_says_it_all,
    played,
    stores,
)
from tests.proxy.embedded_world import config_in, embedded_engine, embedded_world

BUSY = Workload(
    num_sessions=4,
    num_turns=16,
    result_tokens=200,
    tools_tokens=600,
    system_tokens=300,
    compaction_tokens=3000,
    rewrite_share=0.15,
    fork_share=0.1,
    spawn_share=0.1,
)


@pytest.mark.parametrize("declares", [True, False], ids=["declared", "inferred"])
async def test_of_agents_the_dead_are_gone_and_the_living_are_there(tmp_path: Path, declares: bool) -> None:
    engine, config = embedded_engine(), config_in(tmp_path)
    async with embedded_world(engine, config) as world, stores(engine.events.endpoint) as reported:

        async def present() -> set[bytes]:
            keys = sorted(reported | account.live)
            where = engine.runner.locate("", keys)
            return {key for key, tiers in zip(keys, where, strict=True) if tiers}

        account = Account(world, present, set(), reported)
        calls = capped(generated(BUSY), Caps(num_session_calls=25))
        told = await played(world, {"agents": calls}, declares=declares)
        stored, died = await assert_the_dead_are_gone_and_the_living_are_there(account, told)
        assert died > stored / 2 if declares else stored > 0, "what is not declared is doubted first"
    await assert_the_log_says_it_all(config.log_url, world.runtime.tracker.contexts)
