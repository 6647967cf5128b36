"""Which models are mapped, and how: tokenizer and template from disk, name and version from the engine."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.engine_ids import EngineIdsMapper
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.model_profile import EngineFacts, ModelProfile
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.service import MappingService
from engine_bridge.mapping.workers import RenderWorkers
from proxy.config import ModelConfig

ASK_SECONDS = 5.0
WARM_UP_KEY = "warm-up"


class EngineUnreached(Exception):
    """The engine did not tell what we must know of it."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """What the engine says of itself: its version (empty if it has none) and the models it serves."""

    version: str
    models: tuple[str, ...]


class MappedModel(msgspec.Struct, frozen=True):
    """A served model: how its prompts are mapped, or (`service` None) why no template can.

    With `engine_ids` the engine's own token ids stand in for the template, in enforce.
    """

    name: str
    service: MappingService | None = None
    fingerprint: str = ""
    reason: str = ""
    engine_ids: EngineIdsMapper | None = None


async def ask_engine(upstream_url: str, authorization: str = "") -> EngineIdentity:
    """Ask `/version` and `/v1/models`. Raises `EngineUnreached`."""
    headers = {"authorization": authorization} if authorization else {}
    base = upstream_url.rstrip("/").removesuffix("/v1")
    try:
        async with httpx.AsyncClient(timeout=ASK_SECONDS, headers=headers) as client:
            listed = await client.get(f"{base}/v1/models")
            listed.raise_for_status()
            entries = listed.json()["data"]
            version = await client.get(f"{base}/version")
            told = version.json().get("version", "") if version.is_success else ""
            names = tuple(entry["id"] for entry in entries if not entry.get("parent"))
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EngineUnreached(f"{base}: {type(error).__name__}: {error}") from error
    return EngineIdentity(str(told), names)


def load_profile(config: ModelConfig, engine: EngineIdentity) -> ModelProfile | MappedModel:
    """The model's tokenizer and template, or why it cannot be mapped. Reads files: not on the event loop."""
    name = config.name or (engine.models[0] if engine.models else "")
    facts = EngineFacts(engine_version=engine.version, default_kwargs=config.chat_template_kwargs)
    try:
        return ModelProfile.load(Path(config.path), name, facts)
    except Unmappable as error:
        return MappedModel(name, reason=str(error))
    except (OSError, ValueError) as error:
        return MappedModel(name, reason=f"{config.path}: {error}")


def model_by_ids(model: MappedModel, engine: EngineIdentity, chunk_tokens: int) -> MappedModel:
    """A model that no template maps, mapped by the engine's ids."""
    fingerprint = f"engine-ids {engine.version} {chunk_tokens}"
    return msgspec.structs.replace(model, fingerprint=fingerprint, engine_ids=EngineIdsMapper(chunk_tokens))


def mapped_model(profile: ModelProfile, chunk_tokens: int, num_workers: int) -> MappedModel:
    """The model ready to map, in chunks of the cache's size."""
    service = MappingService(ChatMapper(profile, chunk_tokens), RenderWorkers(num_workers))
    return MappedModel(profile.name, service, profile.fingerprint)


async def warm_up(model: MappedModel) -> None:
    """Start the render processes with a first prompt: they take seconds, which no call should wait for."""
    if model.service is not None:
        with suppress(Unmappable):
            await model.service.map(WARM_UP_KEY, ChatPrompt(messages=[{"role": "user", "content": "hi"}]))
        model.service.forget(WARM_UP_KEY)


def plain_ids(profile: ModelProfile, text: str) -> Sequence[int]:
    """Token ids of a text on its own, without special tokens added."""
    return profile.tokenizer.encode(text)
