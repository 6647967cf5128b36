"""What the doctor says of a real deployment, sound and not."""

from pathlib import Path

import msgspec

from engine_bridge.stack.engine_stack import EngineStack
from proxy.config import Config
from proxy.doctor import examine
from proxy.local import local_config


async def findings(config: Config) -> dict[str, tuple[bool, str]]:
    return {f.subject: (f.ok, f.text) for f in await examine(config)}


async def test_a_sound_deployment_is_in_order_and_its_events_are_heard(
    engine_stack: EngineStack, tmp_path: Path
) -> None:
    found = await findings(local_config(engine_stack, tmp_path))
    assert all(ok for ok, _ in found.values()), found
    assert found["level"][1].startswith("1 ")
    assert found["KV events"][1] == f"heard from {engine_stack.events_endpoint}"


async def test_an_endpoint_that_says_nothing_is_named(engine_stack: EngineStack, tmp_path: Path) -> None:
    config = local_config(engine_stack, tmp_path)
    deaf = f"ipc://{tmp_path}/nobody.sock"
    cache = msgspec.structs.replace(config.cache, events_endpoint=deaf)
    found = await findings(msgspec.structs.replace(config, cache=cache))
    ok, text = found["KV events"]
    assert not ok
    assert text.startswith(deaf)
    assert found["cache"][0]
