"""What a proxy stands on, for `kvtether doctor`: clocks, the place of its log, its tokens, its collector.

Everything is only looked at. What is in order is said as well: it was looked at then.
"""

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from sqlalchemy import make_url

from engine_bridge.engine_address import EngineAddress
from lifecycle.errors import LifecycleError
from lifecycle.store.redis_server import RedisServer
from proxy.cache_driver import engine_addresses
from proxy.config import Config
from proxy.doctor import Finding
from proxy.models import EngineUnreached, MappedModel, ask_engine, load_profile, template_problem
from proxy.system import SystemClock

ASK_SECONDS = 5.0

MAX_SKEW_SECONDS = 5.0
"""Clocks further apart make leases end early or late. A `Date` header tells whole seconds only."""

MIN_FREE_BYTES = 1 << 30
MAX_MEMORY_SHARE = 0.9
LOCK_SECONDS = 5.0


async def look_around(config: Config) -> list[Finding]:
    """Look at each once, as far as it is configured and there."""
    return [
        finding
        for part in (_clocks(config), _event_log(config), _tokens(config), _collector(config))
        async for finding in part
    ]


async def _clocks(config: Config) -> AsyncIterator[Finding]:
    places = [
        (f"upstream {each.name}".rstrip(), f"{each.base}/v1/models", each)
        for each in engine_addresses(config)
    ]
    if config.cache.driver != "none":
        coordinator = config.cache.coordinator_url.rstrip("/")
        places.append(("cache coordinator", f"{coordinator}/instances", EngineAddress(coordinator)))
    for name, url, place in places:
        try:
            async with httpx.AsyncClient(timeout=ASK_SECONDS, trust_env=False, mounts=place.mounts) as client:
                answer = await client.get(url, headers=place.headers)
        except httpx.HTTPError:
            continue  # that it is away is said where it is asked for what it serves
        if name.startswith("upstream") and answer.status_code in (401, 403):
            where = "upstreams[].api_key_env" if name != "upstream" else "upstream.api_key_env"
            yield Finding(
                f"{name} key",
                False,
                f"the engine answers {answer.status_code}: name its key's variable in {where}",
            )
        told = answer.headers.get("date", "")
        try:
            skew = SystemClock().now_ns() / 1e9 - parsedate_to_datetime(told).timestamp()
        except ValueError:
            continue
        yield _clock(name, skew - 0.5)


def _clock(name: str, skew_seconds: float) -> Finding:
    if abs(skew_seconds) <= MAX_SKEW_SECONDS:
        return Finding(f"clock of {name}", True, f"within {MAX_SKEW_SECONDS:g} s of ours")
    side = "ahead of" if skew_seconds > 0 else "behind"
    return Finding(
        f"clock of {name}",
        False,
        f"ours is {abs(skew_seconds):.0f} s {side} it: let both machines follow one time server (NTP)",
    )


async def _event_log(config: Config) -> AsyncIterator[Finding]:
    if config.log_url.startswith("sqlite:"):
        database = make_url(config.log_url).database
        if database and not database.startswith((":memory:", "file:")):
            for finding in await asyncio.to_thread(sqlite_place, Path(database)):
                yield finding
    elif urlsplit(config.log_url).scheme in ("redis", "rediss"):
        async for finding in _redis_place(config.log_url):
            yield finding


def sqlite_place(database: Path) -> list[Finding]:
    """Whether the log can be written where it is, and for how long. Blocks."""
    directory = database.absolute().parent
    if not directory.is_dir():
        return [Finding("event log's place", False, f"{directory} is not there: make it, or set log_url")]
    findings = []
    free = shutil.disk_usage(directory).free
    text = f"{free / 2**30:.1f} GiB are free in {directory}"
    if free < MIN_FREE_BYTES:
        text += "; without room observations wait in memory: make room, or lower retention_hours"
    findings.append(Finding("event log's disk", free >= MIN_FREE_BYTES, text))
    # The log's own journal lies beside it: the directory is written as well.
    closed = [str(each) for each in (directory, database) if each.exists() and not os.access(each, os.W_OK)]
    if closed:
        text = f"this user cannot write {' and '.join(closed)}: give it to the user the proxy runs as"
        return [*findings, Finding("event log's place", False, text)]
    if database.exists():
        findings.append(_write_lock(database))
    return findings


def _write_lock(database: Path) -> Finding:
    """A write transaction is begun and given up."""
    connection = sqlite3.connect(database, timeout=LOCK_SECONDS, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        text = f"{database} takes no write: {error}; look for a process that holds it, and at its file system"
        return Finding("event log's place", False, text)
    finally:
        connection.close()
    return Finding("event log's place", True, f"{database} can be written")


async def _redis_place(url: str) -> AsyncIterator[Finding]:
    server = RedisServer(url, ASK_SECONDS)
    try:
        (told,) = await server.read(("TIME",))
        yield _clock("the event log", SystemClock().now_ns() / 1e9 - (told[0] + told[1] / 1e6))
        memory, persistence = await server.read(("INFO", "memory"), ("INFO", "persistence"))
    except LifecycleError as error:
        yield Finding("event log's Redis", False, str(error))
        return
    finally:
        await server.close()
    used, most = int(memory["used_memory"]), int(memory.get("maxmemory", 0))
    room = not most or used < MAX_MEMORY_SHARE * most
    text = f"{used / 2**20:.0f} MiB used of {f'{most / 2**20:.0f} MiB' if most else 'no limit'}"
    if not room:
        text += "; a full Redis takes no events: raise maxmemory, or lower retention_hours"
    yield Finding("event log's memory", room, text)
    written = str(persistence.get("aof_last_write_status", "ok"))
    text = (
        "the last write of its file went well"
        if written == "ok"
        else f"its last write: {written}, look at its disk"
    )
    yield Finding("event log's file", written == "ok", text)


async def _tokens(config: Config) -> AsyncIterator[Finding]:
    for address in engine_addresses(config):
        try:
            engine = await ask_engine(address)
        except EngineUnreached:
            continue
        for model in config.models:
            profile = await asyncio.to_thread(load_profile, model, engine)
            if isinstance(profile, MappedModel) or profile.name not in engine.models:
                continue
            try:
                problem = await template_problem(profile, address)
            except EngineUnreached as error:
                problem = f"{error}; the engine's /tokenize is needed to compare"
            text = problem or "as the engine's, as far as its /tokenize tells"
            where = f" on {address.name}" if address.name else ""
            yield Finding(f"tokens of {profile.name}{where}", not problem, text)


async def _collector(config: Config) -> AsyncIterator[Finding]:
    if not config.tracing.endpoint:
        return
    try:
        from proxy.otel_tracing import traces_url
    except ImportError as error:
        yield Finding("traces", False, f"{error}; install kvtether[tracing]")
        return
    url, began = traces_url(config.tracing.endpoint), time.perf_counter()
    try:
        async with httpx.AsyncClient(timeout=ASK_SECONDS) as client:
            # No span at all is a valid message.
            answer = await client.post(url, content=b"", headers={"content-type": "application/x-protobuf"})
    except httpx.HTTPError as error:
        yield Finding("traces", False, f"{url}: {error or type(error).__name__}; check tracing.endpoint")
        return
    if answer.is_success:
        yield Finding("traces", True, f"{url} answers in {(time.perf_counter() - began) * 1e3:.0f} ms")
    else:
        text = f"{url} answers {answer.status_code}: an OTLP receiver over HTTP is expected (port 4318)"
        yield Finding("traces", False, text)
