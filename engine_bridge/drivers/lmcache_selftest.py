"""Start-up test of engines with LMCache: do the keys we compute name what the cache stores?

It sends two short probe calls of random text through each engine and looks them up by key. It deletes
nothing, pins nothing and leaves a handful of chunks behind that age out like any others.
"""

import asyncio
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.drivers.lmcache_client import Found, Instance, LmcacheClient, Reply
from engine_bridge.drivers.lmcache_keys import (
    CannotExpand,
    Layout,
    expand,
    layout_from_status,
    unknown_objects,
)
from engine_bridge.engine_address import EngineAddress
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import KV_TRANSFER_PARAMS, MAX_OFFLOAD_TOKENS

KNOWN_LMCACHE = frozenset({"0.5.6"})
KNOWN_VLLM = frozenset({"0.32.0"})
HASH_ALGORITHM = "blake3"
PROBE_CHUNKS = 3
POLLS = 40
DEFAULT_FLUSH_SECONDS = 1.0
PARITY_TEXTS = (
    "Grüße, 世界! 🧪",
    "def f(x):\n\treturn x  # two  spaces\r\n",
    "<|im_start|>user\n12345 67890<|im_end|>",
)

NOT_RUN = "the self-test has not run"
CHECK_ADDRESS = ": check the address and that the server runs"

Tokenize = Callable[[str], Sequence[int] | None]


class Findings(msgspec.Struct, kw_only=True):
    """What the test learned. `problems` is what stands against control; each names its fix.

    `unreached` are engines that do not answer, by name, with the reason; they stand against control only
    where no engine answers. `stores_on` names the cache servers that each engine was seen to store on.
    `key_models` maps a served model name to the name that stands in cache keys. `save_decode_cache` is
    None where engines do not show their configuration (only their development mode does). Empty
    `admission_problem` means that the bypass hint works.
    """

    problems: list[str] = []
    unreached: dict[str, str] = {}
    stores_on: dict[str, frozenset[str]] = {}
    key_models: dict[str, str] = {}
    chunk_size: int = 0
    layout: Layout | None = None
    flush_seconds: float = 0.0
    bytes_per_token: int = 0
    save_decode_cache: bool | None = None
    admission_problem: str = NOT_RUN


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class StartupTest:
    """One run of the test. `chunk_size` 0 takes the servers' own; `tokenize` is our side of the parity check,
    without special tokens added; `salts_adapters` says that calls of LoRA adapters carry a salt of their own.
    """

    def __init__(
        self,
        client: LmcacheClient,
        engines: Sequence[EngineAddress],
        *,
        chunk_size: int = 0,
        tokenize: Tokenize | None = None,
        salts_adapters: bool = False,
    ) -> None:
        self._client = client
        self._engines = engines
        self._engine = engines[0]
        self._chunk_size = chunk_size
        self._tokenize = tokenize
        self._salts_adapters = salts_adapters
        self._found = Findings()
        self._problems = self._found.problems = []

    async def run(self) -> Findings:
        """Never raises for what it finds; an unreachable peer is a problem like any other."""
        try:
            instances = await self._client.instances()
            if not instances:
                self._problems.append(
                    "no cache server is registered: start `lmcache server` with --coordinator-url and an "
                    "--coordinator-advertise-ip the proxy can reach"
                )
                return self._found
            statuses = [await self._client.status(each) for each in instances]
            self._check_chunks(instances, statuses)
            for instance in instances:
                await self._check_server(instance)
        except CacheUnavailable as error:
            self._problems.append(f"{error}{CHECK_ADDRESS}")
            return self._found
        for engine in self._engines:
            await self._test_engine(engine, statuses)
        if len(self._found.unreached) == len(self._engines):
            self._found.problems += self._found.unreached.values()
        return self._found

    async def _test_engine(self, engine: EngineAddress, statuses: Sequence[Mapping[str, Any]]) -> None:
        self._engine, self._problems = engine, []
        try:
            version = (await self._ask("GET", "/version", _Version)).version
        except CacheUnavailable as error:
            self._found.unreached[engine.name] = engine.named(f"{error}{CHECK_ADDRESS}")
            return
        try:
            model = await self._check_engine(version)
            if model is not None and self._found.chunk_size:
                await self._check_tokenizer(model)
                await self._check_keys(model, statuses)
        except CannotExpand as error:
            self._problems.append(
                f"{error}: start the engine with LMCacheMPConnector pointing at these servers; "
                "after a restart of a server it registers again within its heartbeat"
            )
        except CacheUnavailable as error:
            self._problems.append(f"{error}{CHECK_ADDRESS}")
        self._found.problems += [engine.named(problem) for problem in self._problems]

    def _check_chunks(self, instances: Sequence[Instance], statuses: Sequence[Mapping[str, Any]]) -> None:
        sizes = {int(status.get("chunk_size") or 0) for status in statuses}
        if len(sizes) > 1:
            self._problems.append(
                f"cache servers use chunk sizes {sorted(sizes)}: start all with one --chunk-size"
            )
            return
        size = sizes.pop()
        if self._chunk_size and size != self._chunk_size:
            self._problems.append(
                f"the servers use chunks of {size} tokens, we are configured for {self._chunk_size}: "
                f"set the chunk size to {size}"
            )
        self._found.chunk_size = size
        for instance, status in zip(instances, statuses, strict=True):
            algorithm = status.get("hash_algorithm")
            if algorithm != HASH_ALGORITHM:
                self._problems.append(
                    f"{instance.instance_id} hashes with {algorithm}: start it with --hash-algorithm blake3"
                )

    async def _check_server(self, instance: Instance) -> None:
        name = instance.instance_id
        version = await self._client.version(instance)
        if version not in KNOWN_LMCACHE:
            self._problems.append(
                f"{name} runs LMCache {version}, tested are {', '.join(sorted(KNOWN_LMCACHE))}: "
                "observe only, until this version is tested"
            )
        adapters = await self._client.adapters(instance)
        if len(set(adapters)) < len(adapters):
            self._problems.append(
                f"{name} has two L2 adapters of one type, deletes reach only the first: configure one"
            )
        problems, flush_seconds = server_flags(await self._client.configuration(instance))
        self._problems += [f"{name} {problem}" for problem in problems]
        self._found.flush_seconds = max(self._found.flush_seconds, flush_seconds)

    async def _check_engine(self, version: str) -> str | None:
        """Served name of the base model to probe with."""
        if version not in KNOWN_VLLM:
            self._problems.append(
                f"the engine is vLLM {version}, tested are {', '.join(sorted(KNOWN_VLLM))}: "
                "observe only, until this version is tested"
            )
        models = (await self._ask("GET", "/v1/models", _Models)).data
        base = [model for model in models if not model.parent]
        for model in base:
            name = model.root or model.id
            known = self._found.key_models.setdefault(model.id, name)
            if known != name:
                self._problems.append(
                    f"{model.id} stands in cache keys as {name}, for another engine as {known}: start both "
                    "with one --model value, or neither finds what the other stored"
                )
                return None
        adapters = [model.id for model in models if model.parent]
        if adapters and not self._salts_adapters:
            self._problems.append(
                f"adapters {', '.join(sorted(adapters))} share cache keys with their base model: "
                "salt their calls by adapter"
            )
        info = await self._ask("GET", "/server_info?config_format=json", dict[str, Any], absent={})
        saves = saves_decode(info)
        if saves is not None:
            self._found.save_decode_cache = saves and self._found.save_decode_cache is not False
        if not base:
            self._problems.append("the engine serves no base model: check /v1/models")
            return None
        return base[0].id

    async def _ask(
        self, method: str, path: str, reply: type[Reply], body: object = None, absent: Reply | None = None
    ) -> Reply:
        url, headers = self._engine.base + path, self._engine.headers
        return await self._client.call(method, url, reply, body, absent=absent, extra_headers=headers)

    async def _engine_tokens(self, model: str, text: str) -> list[int]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return (await self._ask("POST", "/tokenize", _Tokens, body)).tokens

    async def _check_tokenizer(self, model: str) -> None:
        if self._tokenize is None:
            return
        for text in PARITY_TEXTS:
            ours = self._tokenize(text)
            if ours is None:
                return
            if list(ours) != await self._engine_tokens(model, text):
                self._problems.append(
                    f"our tokenizer and the engine's differ on {text!r}: give the proxy the tokenizer files "
                    "that the engine serves"
                )
                return

    async def _check_keys(self, model: str, statuses: Sequence[Mapping[str, Any]]) -> None:
        """A probe's computed keys must appear, and the coordinator must compute the same ones."""
        key_model = self._found.key_models[model]
        layout = self._found.layout = layout_from_status(statuses, key_model)
        size = self._found.chunk_size
        token_ids = await self._probe_tokens(model)
        keys = split_keys(chunk_keys(array("I", token_ids), size))
        world = min(layout.world_sizes)
        chunks, resolved = await self._client.resolve(token_ids, key_model, world, "")
        if chunks != len(keys):
            self._problems.append(
                f"the coordinator cuts {len(token_ids)} tokens into {chunks} chunks, the servers into "
                f"{len(keys)}: start it with --chunk-size {size}"
            )
        elif [key.hex() for key in keys] != list(dict.fromkeys(each.key.chunk_hash_hex for each in resolved)):
            self._problems.append(
                "the coordinator computes other keys than we do: start coordinator and servers with "
                "--hash-algorithm blake3"
            )
        await self._call_engine(model, token_ids, {})
        found = await self._await_stored(keys, key_model, layout)
        stored = {each.key.chunk_key for each in found if each.placements}
        if stored != set(keys):
            self._problems.append(
                f"{len(keys) - len(stored)} of {len(keys)} computed keys of a probe do not show in the "
                "directory: check that the engine's LMCacheMPConnector points at these servers, and that "
                "they report events (--coordinator-event-reporting)"
            )
            return
        _, seen = await self._client.resolve(token_ids, key_model, world, "")
        extra = unknown_objects((each.key for each in seen if each.placements), layout)
        if extra:
            self._problems.append(
                f"the cache holds objects the servers do not declare (rank {extra[0].kv_rank}, group "
                f"{extra[0].object_group_id}): register every engine worker, or restart the servers"
            )
        self._found.stores_on[self._engine.name] = frozenset(
            placement.instance_id for each in found for placement in each.placements if not placement.shared
        )
        size_told = bytes_per_token(found, len(keys), size) or layout.bytes_per_token
        self._found.bytes_per_token = max(self._found.bytes_per_token, size_told)
        await self._check_admission(model, key_model, layout)

    async def _check_admission(self, model: str, key_model: str, layout: Layout) -> None:
        """With the bypass hint only the first chunk of a probe may be stored."""
        size = self._found.chunk_size
        token_ids = await self._probe_tokens(model)
        keys = split_keys(chunk_keys(array("I", token_ids), size))
        await self._call_engine(model, token_ids, {KV_TRANSFER_PARAMS: {MAX_OFFLOAD_TOKENS: size}})
        await self._await_stored(keys[:1], key_model, layout)
        await asyncio.sleep(2 * self._found.flush_seconds)
        found = await self._client.lookup(expand(keys, key_model, "", layout))
        stored = {each.key.chunk_key for each in found if each.placements}
        ignored = f"the engine does not honour {MAX_OFFLOAD_TOKENS}: {len(stored)} chunks stored, not 1"
        problem = "" if stored == set(keys[:1]) else self._engine.named(ignored)
        earlier = self._found.admission_problem
        self._found.admission_problem = problem if earlier == NOT_RUN else earlier or problem

    async def _probe_tokens(self, model: str) -> list[int]:
        """Random text as tokens: a few whole chunks and a partial one, never seen before."""
        wanted = PROBE_CHUNKS * self._found.chunk_size + self._found.chunk_size // 2
        tokens = await self._engine_tokens(model, secrets.token_hex(2 * wanted))
        return tokens[:wanted]

    async def _call_engine(self, model: str, token_ids: Sequence[int], extra: Mapping[str, object]) -> None:
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 0, **extra}
        await self._ask("POST", "/v1/completions", dict[str, Any], body)

    async def _await_stored(self, keys: Sequence[bytes], key_model: str, layout: Layout) -> list[Found]:
        """Objects of the keys once all have a copy, or as they are after a bounded wait."""
        found: list[Found] = []
        for _ in range(POLLS):
            found = await self._client.lookup(expand(keys, key_model, "", layout))
            if all(each.placements for each in found):
                break
            await asyncio.sleep(self._found.flush_seconds / 4)
        return found


def server_flags(configuration: Mapping[str, Any]) -> tuple[list[str], float]:
    """Problems in a cache server's `GET /config`, and its event flush interval in seconds."""
    problems: list[str] = []
    coordinator = configuration.get("coordinator") or {}
    if not coordinator.get("event_reporting"):
        problems.append(
            "reports no events, so nothing can be verified: start it with --coordinator-event-reporting"
        )
    if (configuration.get("mp") or {}).get("engine_type", "default") != "default":
        problems.append(
            "blends fragments, so a key does not name its prefix: start it with --engine-type default"
        )
    return problems, float(coordinator.get("event_flush_interval") or DEFAULT_FLUSH_SECONDS)


def saves_decode(server_info: Mapping[str, Any]) -> bool | None:
    """Whether generated tokens are stored, by the engine's `/server_info`; None if it does not say."""
    transfer = (server_info.get("vllm_config") or {}).get("kv_transfer_config") or {}
    extra = transfer.get("kv_connector_extra_config")
    return None if extra is None else bool(extra.get("lmcache.mp.save_decode_cache", False))


def bytes_per_token(found: Sequence[Found], num_chunks: int, chunk_size: int) -> int:
    """Size of one token over all ranks and groups, by what the cache says its objects take in one tier."""
    total = sum(max((placement.size_bytes for placement in each.placements), default=0) for each in found)
    return total // (num_chunks * chunk_size) if num_chunks and chunk_size else 0
