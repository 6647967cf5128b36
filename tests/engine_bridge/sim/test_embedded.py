"""The whole engine starts in no time, is heard through its events, and leaves nothing behind."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from engine_bridge.cache_events import BlocksStored, EventSubscriber
from engine_bridge.errors import Unmappable
from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.hardware import INSTANT, EngineConfig
from lifecycle.vocabulary import Tier

CONFIG = EngineConfig(hardware=INSTANT, chunk_tokens=64)
BODY = {"prompt": list(range(100, 200)), "max_tokens": 40, "ignore_eos": True, "session_id": "call-1"}


async def test_its_events_tell_what_a_call_computed_and_stored() -> None:
    async with EmbeddedEngine(EmbeddedOptions(engine=CONFIG)) as engine:
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as http:
            (await http.post("/v1/completions", json=BODY)).raise_for_status()
        subscriber = EventSubscriber(
            engine.events.endpoint, replay_endpoint=engine.events.replay_endpoint, topic="kv"
        )
        blocks: list[int] = []
        chunks: list[BlocksStored] = []
        async with asyncio.timeout(20):
            async for batch in subscriber.batches():
                for event in batch.events:
                    assert isinstance(event, BlocksStored)
                    if event.tier is Tier.GPU:
                        assert event.session_id == "call-1"
                        blocks += event.token_ids
                    else:
                        chunks.append(event)
                if len(chunks) == 2:
                    break
    assert blocks[:100] == BODY["prompt"]
    assert len(blocks) == 139 // 16 * 16, "the last token has no KV"
    assert [list(chunk.token_ids) for chunk in chunks] == [blocks[:64], blocks[64:128]]


async def test_without_saving_what_is_generated_only_prompts_are_stored() -> None:
    async with EmbeddedEngine(EmbeddedOptions(engine=CONFIG, save_generated=False)) as engine:
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as http:
            (await http.post("/v1/completions", json=BODY)).raise_for_status()
        assert engine.runner.stats().tokens.completion_tokens == 40
        assert engine.runner.stats().tiers[Tier.L1].num_chunks <= 1


async def test_a_prompt_that_does_not_fit_into_hbm_is_too_long() -> None:
    small = msgspec.structs.replace(INSTANT, hbm_bytes=64 * 16 * INSTANT.bytes_per_token)
    async with EmbeddedEngine(EmbeddedOptions(engine=EngineConfig(hardware=small))) as engine:
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as http:
            [card] = (await http.get("/v1/models")).json()["data"]
            refused = await http.post("/v1/completions", json={"prompt": [1] * 1024})
            fits = await http.post(
                "/v1/completions", json={"prompt": [1] * 1000, "max_tokens": 500, "ignore_eos": True}
            )
        assert card["max_model_len"] == 1024
        assert refused.status_code == 400
        assert "maximum context length is 1024" in refused.json()["error"]["message"]
        assert fits.json()["usage"]["completion_tokens"] == 24


async def test_it_ends_with_its_block() -> None:
    async with EmbeddedEngine(EmbeddedOptions(engine=CONFIG)) as engine:
        folder = Path(engine.events.endpoint.removeprefix("ipc://")).parent
        assert folder.is_dir()
    assert not folder.exists()
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{engine.url}/health")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError, Unmappable)):
        EmbeddedEngine(EmbeddedOptions(model_path=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="absent"):
        EmbeddedEngine(EmbeddedOptions(model_path=str(tmp_path / "absent")))
