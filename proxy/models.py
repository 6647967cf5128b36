"""Which models are mapped, and how: tokenizer and template from disk, name and version from the engine."""

import asyncio
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine_bridge.engine_address import EngineAddress
from engine_bridge.errors import RejectedByEngine, TemplateMismatch, Unmappable
from engine_bridge.mapping.anthropic import MessagesPrompt, Turn
from engine_bridge.mapping.backlog import MappingBacklog
from engine_bridge.mapping.engine_ids import EngineIdsMapper
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.model_profile import EngineFacts, ModelProfile
from engine_bridge.mapping.service import MappingService
from engine_bridge.mapping.verify import verify
from engine_bridge.mapping.workers import RenderWorkers
from proxy.config import ModelConfig

ASK_SECONDS = 5.0
WARM_UP_KEY = "warm-up"
ANOTHER_TEMPLATE = (
    "the engine renders or encodes otherwise, so the model is only observed: set models[].path to the "
    "directory that the engine serves, with its chat template, and chat_template_kwargs to its defaults"
)


class EngineUnreached(Exception):
    """The engine did not tell what we must know of it."""


class _NoSuchEndpoint(Exception):
    """The engine has no `/tokenize` that answers with tokens."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """What the engine says of itself: its version (empty if it has none) and the models it serves."""

    version: str
    models: tuple[str, ...]


class MappedModel(msgspec.Struct, frozen=True):
    """A served model: how its prompts are mapped, or (`service` None) why no template can.

    With `engine_ids` the engine's own token ids stand in for the template, in enforce. With `reason` and a
    `service` our tokens are known to be wrong: the model is only observed. `pending` is set when it is known
    which of all this is true.
    """

    name: str
    service: MappingService | None = None
    fingerprint: str = ""
    reason: str = ""
    engine_ids: EngineIdsMapper | None = None
    pending: asyncio.Event | None = None


def not_reached(name: str, prepared: asyncio.Event, fingerprint: str = "") -> MappedModel:
    """A model of which is not known yet whether and how it can be mapped, until `prepared`."""
    reason = "the engine has not been reached yet"
    return MappedModel(name, fingerprint=fingerprint, reason=reason, pending=prepared)


def asking(engine: EngineAddress) -> httpx.AsyncClient:
    """A client that reaches the engine with what it wants of every request."""
    return httpx.AsyncClient(timeout=ASK_SECONDS, headers=engine.headers, mounts=engine.mounts)


async def ask_engine(engine: EngineAddress) -> EngineIdentity:
    """Ask `/version` and `/v1/models`. Raises `EngineUnreached`."""
    base = engine.base
    try:
        async with asking(engine) as client:
            listed = await client.get(f"{base}/v1/models")
            listed.raise_for_status()
            entries = listed.json()["data"]
            version = await client.get(f"{base}/version")
            told = version.json().get("version", "") if version.is_success else ""
            names = tuple(entry["id"] for entry in entries if not entry.get("parent"))
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EngineUnreached(f"{engine.url}: {type(error).__name__}: {error}") from error
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


def mapped_model(
    profile: ModelProfile, chunk_tokens: int, num_workers: int, backlog: MappingBacklog
) -> MappedModel:
    """The model ready to map, in chunks of the cache's size."""
    service = MappingService(ChatMapper(profile, chunk_tokens), RenderWorkers(num_workers), backlog=backlog)
    return MappedModel(profile.name, service, profile.fingerprint)


async def warm_up(model: MappedModel) -> None:
    """Start the render processes with a first prompt: they take seconds, which no call should wait for.

    It is one that also tries out how the template takes what the Messages API asks of it.
    """
    hello = Turn("user", [{"role": "user", "content": "hi"}])
    if model.service is not None:
        with suppress(Unmappable):
            await model.service.map(WARM_UP_KEY, MessagesPrompt(system=(), turns=(hello,), thinking_off=True))
        model.service.forget(WARM_UP_KEY)


async def map_models(
    models: dict[str, MappedModel],
    profiles: Mapping[str, ModelProfile],
    engine: EngineIdentity,
    chunk_tokens: int,
    num_workers: int,
    backlog: MappingBacklog,
    served: Mapping[EngineAddress, Container[str]],
) -> None:
    """Make every model ready to map, in place, and prove those that we render to be what engines render.

    `served` are the engines that were reached, with the models that each of them serves: where one renders
    otherwise than the others, nobody's tokens are known.

    May be repeated: what was wrong may be right now. Raises `EngineUnreached`.
    """
    for name, profile in profiles.items():
        known = models[name]
        if known.service is None:
            known = mapped_model(profile, chunk_tokens, num_workers, backlog)
            await warm_up(known)
        problems = [
            address.named(problem)
            for address, names in served.items()
            if (name in names or len(served) == 1) and (problem := await template_problem(profile, address))
        ]
        models[name] = msgspec.structs.replace(known, reason="; ".join(problems))
    for name, known in models.items():
        if known.service is None and known.engine_ids is None:
            models[name] = model_by_ids(known, engine, chunk_tokens)


async def template_problem(profile: ModelProfile, engine: EngineAddress) -> str:
    """Why our prompts are not the engine's, token by token; empty if they are.

    Empty, too, for an engine that does not tell tokens: then only keys can prove or disprove ours. Raises
    `EngineUnreached`.
    """
    url = f"{engine.base}/tokenize"
    async with asking(engine) as client:

        async def tokenize(body: dict[str, Any]) -> Sequence[int]:
            answer = await client.post(url, json=body)
            if answer.status_code == httpx.codes.BAD_REQUEST:
                raise RejectedByEngine(answer.text)
            if answer.is_client_error or answer.status_code == httpx.codes.NOT_IMPLEMENTED:
                raise _NoSuchEndpoint
            answer.raise_for_status()
            document = answer.json()
            if not isinstance(document, dict) or not isinstance(document.get("tokens"), list):
                raise _NoSuchEndpoint
            return list(document["tokens"])

        try:
            await verify(ChatMapper(profile), tokenize)
        except _NoSuchEndpoint:
            return ""
        except TemplateMismatch as error:
            return f"{error}; {ANOTHER_TEMPLATE}"
        except (httpx.HTTPError, ValueError) as error:
            raise EngineUnreached(f"{engine.url}: {type(error).__name__}: {error}") from error
    return ""


def plain_ids(profile: ModelProfile, text: str) -> Sequence[int]:
    """Token ids of a text on its own, without special tokens added."""
    return profile.tokenizer.encode(text)
