"""HTTP to an LMCache coordinator, its cache servers and the engine in front of them.

Only documented endpoints, only what the driver needs; every reply is decoded into a struct that ignores
fields it does not know. Checked against LMCache 0.5.6 and vLLM 0.32.0.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec

from engine_bridge.drivers.lmcache_keys import ObjectKey, batched
from engine_bridge.engine_address import EngineAddress
from engine_bridge.errors import CacheUnavailable
from lifecycle.vocabulary import Tier

TIMEOUT = httpx.Timeout(30.0, connect=3.0)
"""Seconds. Deleting thousands of files takes a while; a server that is there accepts at once."""

PAGE = 10_000
LOOKUP_OBJECTS = 2000
"""A reply holds every chunk's token ids: more at once would keep the event loop busy for too long."""

Reply = TypeVar("Reply")

HeardCall: TypeAlias = Callable[[str, float, bool], None]
"""Told of each request: method and path (of which there are a few), its seconds, and whether it went well."""


def tell_nobody(operation: str, seconds: float, ok: bool) -> None:
    """Nobody is told."""


_PROCESS_START = re.compile(r"^process_start_time_seconds (\S+)$", re.MULTILINE)


class Instance(msgspec.Struct, frozen=True):
    """One cache server as the coordinator knows it."""

    instance_id: str
    ip: str
    http_port: int

    @property
    def url(self) -> str:
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{self.http_port}"


class Placement(msgspec.Struct, frozen=True):
    """One copy of one object. `shared` pools are reachable from every server."""

    instance_id: str
    tier: str
    backend: str
    size_bytes: int
    incarnation: int = 0
    shared: bool = False


class Found(msgspec.Struct, frozen=True):
    """What the directory knows of one object; no placements when it knows nothing.

    The reply's token ids, by far its largest part, are skipped unread.
    """

    key: ObjectKey
    placements: tuple[Placement, ...] = ()


class DeleteReply(msgspec.Struct, frozen=True):
    """`skipped` counts objects refused as locked; `deleted` counts an L2 batch, not what was there."""

    deleted: int
    skipped: int
    ok: bool
    error: str = ""


class _Instances(msgspec.Struct):
    instances: list[Instance]


class _Lookup(msgspec.Struct):
    results: list[Found]
    chunks: int = 0


class _Adapter(msgspec.Struct):
    type_name: str


class _Adapters(msgspec.Struct):
    adapters: list[_Adapter]


class _PinnedKey(msgspec.Struct):
    key: ObjectKey
    pin_count: int


class _Pins(msgspec.Struct):
    total: int
    pins: list[_PinnedKey]


class LmcacheClient:
    """Every call raises `CacheUnavailable` for what went wrong on the other side or on the way. `engines` are
    those that it asks something, too."""

    def __init__(
        self, coordinator_url: str, heard: HeardCall = tell_nobody, engines: Sequence[EngineAddress] = ()
    ) -> None:
        self._heard = heard
        self._coordinator = coordinator_url.rstrip("/")
        mounts = {url: way for engine in engines for url, way in engine.mounts.items()}
        self._http = httpx.AsyncClient(timeout=TIMEOUT, trust_env=False, mounts=mounts)

    async def close(self) -> None:
        await self._http.aclose()

    async def instances(self) -> list[Instance]:
        """The registered cache servers, by id."""
        reply = await self.call("GET", f"{self._coordinator}/instances", _Instances)
        return sorted(reply.instances, key=lambda instance: instance.instance_id)

    async def coordinator_began_ns(self) -> int:
        """When the coordinator's process started, by its own metrics; 0 where it exports none."""
        url = f"{self._coordinator}/metrics"
        response = await self._request("GET", url)
        told = _PROCESS_START.search(response.text) if response.is_success else None
        return int(float(told[1]) * 1e9) if told else 0

    async def lookup(self, keys: Sequence[ObjectKey]) -> list[Found]:
        """The directory's word on each object, in the order asked.

        The directory is fed by events: it lags by the flush interval of the servers.
        """
        found: list[Found] = []
        for batch in batched(keys, LOOKUP_OBJECTS):
            url = f"{self._coordinator}/directory/lookup"
            reply = await self.call("POST", url, _Lookup, {"keys": batch})
            if len(reply.results) != len(batch):
                raise CacheUnavailable(f"{url} answered {len(reply.results)} of {len(batch)} keys")
            found += reply.results
        return found

    async def resolve(
        self, token_ids: Sequence[int], model_name: str, world_size: int, salt: str
    ) -> tuple[int, list[Found]]:
        """Let the coordinator compute the keys of a token sequence: how many chunks, and their objects.

        It names every rank of `world_size` in object group 0, and other groups where it has seen them.
        """
        body = _token_body(token_ids, model_name, world_size, salt)
        reply = await self.call("POST", f"{self._coordinator}/directory/lookup", _Lookup, body)
        return reply.chunks, reply.results

    async def delete(
        self, instance: Instance, keys: Sequence[ObjectKey], tier: Tier, adapter: str | None = None
    ) -> DeleteReply:
        """Delete objects from one tier of one server; at most `MAX_KEYS_PER_REQUEST`. Never forced."""
        body = {"keys": keys, "tier": tier.value, "adapter": adapter, "force": False}
        return await self.call("DELETE", f"{instance.url}/cache/objects", DeleteReply, body)

    async def status(self, instance: Instance) -> dict[str, Any]:
        """A server's internal state."""
        return await self.call("GET", f"{instance.url}/status", dict[str, Any])

    async def configuration(self, instance: Instance) -> dict[str, Any]:
        """The configuration a server runs with."""
        return await self.call("GET", f"{instance.url}/config", dict[str, Any])

    async def adapters(self, instance: Instance) -> list[str]:
        """Type names of a server's L2 adapters, primary first; deletes name an adapter by its type."""
        reply = await self.call("GET", f"{instance.url}/config/adapters", _Adapters)
        return [adapter.type_name for adapter in reply.adapters]

    async def version(self, instance: Instance) -> str:
        return await self.call("GET", f"{instance.url}/lmc_version", str)

    async def pins(self, model_name: str, salt: str) -> dict[ObjectKey, int]:
        """Pin counts by object, in object group 0: a pin covers every group of its chunk.

        Empty for a coordinator without an eviction controller. The coordinator takes an empty salt for
        "any", so salts are told apart here.
        """
        pins: dict[ObjectKey, int] = {}
        offset = 0
        while True:
            page = {"model_name": model_name, "cache_salt": salt, "offset": offset, "limit": PAGE}
            query = urlencode(page)
            reply = await self.call(
                "GET", f"{self._coordinator}/cache/pins?{query}", _Pins, absent=_Pins(0, [])
            )
            pins |= {pin.key: pin.pin_count for pin in reply.pins if pin.key.cache_salt == salt}
            offset += len(reply.pins)
            if not reply.pins or offset >= reply.total:
                return pins

    async def pin(self, token_ids: Sequence[int], model_name: str, world_size: int, salt: str) -> None:
        """Raise the pin count of every complete chunk of the sequence by one."""
        body = _token_body(token_ids, model_name, world_size, salt)
        await self.call("POST", f"{self._coordinator}/cache/pins", dict[str, Any], body)

    async def unpin(self, token_ids: Sequence[int], model_name: str, world_size: int, salt: str) -> None:
        """Lower the pin count of every complete chunk of the sequence by one, not below zero."""
        body = _token_body(token_ids, model_name, world_size, salt)
        await self.call("DELETE", f"{self._coordinator}/cache/pins", dict[str, Any], body)

    async def call(
        self,
        method: str,
        url: str,
        reply: type[Reply],
        body: object = None,
        *,
        absent: Reply | None = None,
        extra_headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request, decoded as `reply`; `absent` stands for a 404."""
        headers = {"content-type": "application/json", **(extra_headers or {})}
        content = None if body is None else msgspec.json.encode(body)
        response = await self._request(method, url, content, headers)
        if response.status_code == 404 and absent is not None:
            return absent
        if response.is_error:
            raise CacheUnavailable(f"{method} {url}: {response.status_code} {response.text[:300]}")
        try:
            return msgspec.json.decode(response.content, type=reply)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise CacheUnavailable(f"{method} {url}: unexpected reply: {error}") from error

    async def _request(
        self,
        method: str,
        url: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        began = time.perf_counter()
        ok = False
        try:
            response = await self._http.request(method, url, content=content, headers=headers)
            ok = not response.is_server_error
        except httpx.HTTPError as error:
            raise CacheUnavailable(f"{method} {url}: {type(error).__name__}: {error}") from error
        finally:
            self._heard(f"{method} {urlsplit(url).path}", time.perf_counter() - began, ok)
        return response


def _token_body(token_ids: Sequence[int], model_name: str, world_size: int, salt: str) -> dict[str, object]:
    return {
        "token_ids": list(token_ids),
        "model_name": model_name,
        "world_size": world_size,
        "cache_salt": salt,
    }
