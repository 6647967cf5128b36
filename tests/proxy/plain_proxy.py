"""A proxy that knows no model and follows nothing, and bytes to send through it, as a test tool."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from proxy.app import Serving, serving
from tests.proxy.whole_proxy import configured

MEGABYTES = os.urandom(5_000_000)

T = TypeVar("T")


@asynccontextmanager
async def proxied(tmp_path: Path, url: str, **changes: Any) -> AsyncIterator[Serving]:
    async with serving(configured(tmp_path, url, models=(), **changes)) as up:
        yield up


async def within(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 20)
