"""Recorded agents on the real stack: what died is gone from the cache, what lives is there, the log knows.

Limits: 220 calls, lists of 24,000 tokens (messages beyond are left out whole), answers of 16 tokens, no
pauses between calls; of `weka_claude_code_a` the first 15 calls of a session, of `lmc_miniswe` the first 20.
That is about 250,000 tokens that no cache could have had. Where no trace lies, made-up agents take their
place, and the test's name says so.
"""

import re
import secrets
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from engine_bridge.sim.traces.calls import Call
from engine_bridge.sim.traces.generated import Workload, generated
from engine_bridge.sim.traces.reader import TraceFile
from engine_bridge.sim.traces.selection import Caps, capped
from engine_bridge.stack.engine_stack import EngineStack
from tests.e2e.agent import config_for, world_of
from tests.e2e.engine_cache import Cache
from tests.e2e.traced_agents import (
    Account,
    assert_the_dead_are_gone_and_the_living_are_there,
    assert_the_log_says_it_all,
    played,
    stores,
)
from tests.engine_bridge.sim.trace_files import recorded

CAPS = {
    "lmc_miniswe": Caps(num_calls=120, num_session_calls=20),
    "weka_claude_code_a": Caps(num_calls=100, num_session_calls=15),
}
PAGE = 10_000
KEY = re.compile("[0-9a-f]{64}")


def selection() -> dict[str, Iterable[Call]]:
    paths = {path.name.split(".")[0]: path for path in recorded()}
    if paths.keys() >= CAPS.keys():
        return {name: capped(TraceFile(paths[name]), caps) for name, caps in CAPS.items()}
    return {"NO-RECORDED-TRACE-made-up": capped(generated(Workload(num_sessions=12)), Caps(num_calls=300))}


async def in_the_directory(cache: Cache) -> set[bytes]:
    """Every key that lies in some tier."""
    found: set[bytes] = set()
    async with httpx.AsyncClient(base_url=cache.stack.coordinator_url, trust_env=False, timeout=60) as http:
        for offset in range(0, 100 * PAGE, PAGE):
            page = (await http.get("/directory/keys", params={"offset": offset, "limit": PAGE})).json()
            found |= {bytes.fromhex(e["key"]["chunk_hash_hex"]) for e in page["keys"] if e["placements"]}
            if offset + PAGE >= page["total"]:
                return found
    raise AssertionError("more keys than anything here stores")


def in_files(stack: EngineStack) -> set[bytes]:
    """Every key of which the last tier has a file, whatever the directory says."""
    names = [path.stem.split("@") for path in stack.l2_dir.glob("*.data")]
    return {bytes.fromhex(part) for name in names for part in name if KEY.fullmatch(part)}


@pytest.mark.parametrize("what", ["+".join(selection())])
async def test_of_recorded_agents_the_dead_are_gone_and_the_living_are_there(
    what: str, engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    config = config_for(engine_stack, tmp_path)

    async def present() -> set[bytes]:
        return await in_the_directory(cache) | in_files(engine_stack)

    async with world_of(cache, config) as world, stores(engine_stack.events_endpoint) as reported:
        assert [model.reason for model in world.runtime.models.values()] == [""]
        account = Account(world, present, await present(), reported)
        run = secrets.token_hex(4)
        told = await played(world, {f"{name}-{run}": calls for name, calls in selection().items()})
        assert in_files(engine_stack) & reported, "files are named otherwise than thought"
        stored, died = await assert_the_dead_are_gone_and_the_living_are_there(account, told)
        assert died > stored / 10
    await assert_the_log_says_it_all(config.log_url, world.runtime.tracker.contexts)
