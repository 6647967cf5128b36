"""A real WebSocket client and a real server, which must not notice the proxy between them."""

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from proxy.app import create_data_app, serving
from proxy.config import Config
from proxy.http_server import HandoverProtocol
from tests.proxy.api_keys import KEYS, bearer, keys
from tests.proxy.live_server import RawClient
from tests.proxy.live_server import serve as serve_app
from tests.proxy.plain_proxy import MEGABYTES, proxied, within
from tests.proxy.whole_proxy import configured

PATH = "/v1/realtime"

Handler = Callable[[ServerConnection], Awaitable[None]]


async def echo(peer: ServerConnection) -> None:
    async for message in peer:
        await peer.send(message)


@asynccontextmanager
async def engine(tmp_path: Path, handler: Handler = echo, **options: Any) -> AsyncIterator[str]:
    """A WebSocket server behind the proxy; gives the proxy's URL. `proxy_changes` configure the proxy."""
    changes = options.pop("proxy_changes", {})
    async with serve(handler, "127.0.0.1", 0, max_size=None, ping_interval=None, **options) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxied(tmp_path, f"http://127.0.0.1:{port}", **changes) as up:
            yield up.data_url.replace("http:", "ws:") + PATH


def dial(url: str, **options: Any) -> connect:
    return connect(url, max_size=None, ping_interval=None, proxy=None, **options)


# -- messages ---------------------------------------------------------------------------------------------


async def test_messages_of_every_kind_arrive_as_they_were_sent(tmp_path: Path) -> None:
    messages: list[str | bytes] = ["", "é😀", "x" * 200_000, b"", bytes(range(256)), MEGABYTES, "last"]
    async with engine(tmp_path) as url, dial(url, compression=None) as client:
        for message in messages:
            await client.send(message)
            assert await within(client.recv()) == message


async def test_fragments_stay_fragments(tmp_path: Path) -> None:
    fragments: list[list[str | bytes]] = [["a", "", "bc"], [b"1", MEGABYTES, b"3"]]
    heard: list[list[str | bytes]] = []

    async def handler(peer: ServerConnection) -> None:
        for _ in fragments:
            heard.append([piece async for piece in peer.recv_streaming()])
            await peer.send(heard[-1][:-1])

    async with engine(tmp_path, handler) as url, dial(url, compression=None) as client:
        for each in fragments:
            await client.send(each)
            assert [piece async for piece in client.recv_streaming()] == heard[-1]
        # This library ends a message that is sent in pieces with an empty one.
        assert heard == [[*each, each[0][:0]] for each in fragments]


async def test_pings_and_pongs_pass_both_ways(tmp_path: Path) -> None:
    pinged = asyncio.Event()

    async def handler(peer: ServerConnection) -> None:
        await (await peer.ping(b"from the engine"))
        pinged.set()
        await echo(peer)

    async with engine(tmp_path, handler) as url, dial(url) as client:
        await within(await client.ping(b"from the client"))
        await within(pinged.wait())


@pytest.mark.parametrize("code", [CloseCode.NORMAL_CLOSURE, CloseCode.TRY_AGAIN_LATER, 4321])
async def test_close_codes_and_reasons_pass_both_ways(tmp_path: Path, code: int) -> None:
    told: asyncio.Future[tuple[int | None, str | None]] = asyncio.get_running_loop().create_future()

    async def handler(peer: ServerConnection) -> None:
        if await peer.recv() == "you":
            await peer.close(code, "the engine's word")
        else:
            await peer.wait_closed()
            told.set_result((peer.close_code, peer.close_reason))

    async with engine(tmp_path, handler) as url:
        async with dial(url) as client:
            await client.send("you")
            with pytest.raises(ConnectionClosed):
                await within(client.recv())
            assert (client.close_code, client.close_reason) == (code, "the engine's word")
        async with dial(url) as client:
            await client.send("I")
            await client.close(code, "the client's word")
        assert await within(told) == (code, "the client's word")


async def test_compression_is_agreed_on_between_the_two(tmp_path: Path) -> None:
    async with engine(tmp_path, compression="deflate") as url:
        async with dial(url, compression="deflate") as client:
            assert client.response is not None
            assert "permessage-deflate" in client.response.headers["Sec-WebSocket-Extensions"]
            for message in ("again " * 50_000, "again " * 50_000, MEGABYTES):
                await client.send(message)
                assert await within(client.recv()) == message
        async with dial(url, compression=None) as client:
            assert client.response is not None
            assert "Sec-WebSocket-Extensions" not in client.response.headers


async def test_a_subprotocol_is_agreed_on_between_the_two(tmp_path: Path) -> None:
    async with (
        engine(tmp_path, subprotocols=["realtime", "other"]) as url,
        dial(url, subprotocols=["unknown", "other"]) as client,
    ):
        assert client.subprotocol == "other"


async def test_a_refusal_comes_back_with_its_status_headers_and_body(tmp_path: Path) -> None:
    def refuse(peer: ServerConnection, request: Request) -> Response:
        response = peer.respond(HTTPStatus.FORBIDDEN, "not you: é\n")
        response.headers["X-Why"] = "a reason"
        return response

    async with engine(tmp_path, process_request=refuse) as url:
        with pytest.raises(InvalidStatus) as refused:
            await within(_open(url))
        answer = refused.value.response
        assert (answer.status_code, answer.body) == (403, "not you: é\n".encode())
        assert answer.headers["X-Why"] == "a reason"


async def _open(url: str, **options: Any) -> ClientConnection:
    return await dial(url, **options)


async def test_many_at_once_do_not_mix(tmp_path: Path) -> None:
    async def talk(url: str, number: int) -> None:
        async with dial(url) as client:
            for turn in range(5):
                message = f"{number}/{turn} ".encode() * (1000 * (number % 7) + 1)
                await client.send(message)
                assert await client.recv() == message

    async with engine(tmp_path) as url, asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(within(talk(url, number)))
        await within(asyncio.gather(*list(group._tasks)))


async def test_an_engine_behind_tls_is_reached_and_both_ends_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    gone = asyncio.Event()

    async def handler(peer: ServerConnection) -> None:
        try:
            await echo(peer)
        finally:
            gone.set()

    async with serve(handler, "127.0.0.1", 0, max_size=None, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxied(tmp_path, f"https://127.0.0.1:{port}") as up:
            url = up.data_url.replace("http:", "ws:") + PATH
            async with dial(url) as client:
                for message in ("x", MEGABYTES):
                    await client.send(message)
                    assert await within(client.recv()) == message
            assert client.close_code == CloseCode.NORMAL_CLOSURE
            await within(gone.wait())
            gone.clear()
            vanishing = await _open(url)
            vanishing.transport.abort()
            await within(gone.wait())


def self_signed(directory: Path) -> Path:
    """Key and certificate of 127.0.0.1 in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    serial = x509.random_serial_number()
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), serial, now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path = directory / "engine.pem"
    path.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
    return path


# -- keys, the end ----------------------------------------------------------------------------------------


async def test_a_key_is_needed_and_stays_between_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []

    async def handler(peer: ServerConnection) -> None:
        assert peer.request is not None
        seen.append(peer.request.headers.get("Authorization"))
        await echo(peer)

    async with engine(tmp_path, handler, proxy_changes={"api_keys": keys()}) as url:
        with pytest.raises(InvalidStatus) as refused:
            await _open(url)
        assert refused.value.response.status_code == 401
        with pytest.raises(InvalidStatus) as refused:
            await _open(url.replace(PATH, "/sleep"), additional_headers=bearer("a"))
        assert refused.value.response.status_code == 403
        async with dial(url, additional_headers=bearer("a")) as client:
            await client.send("x")
            assert await within(client.recv()) == "x"
        assert seen == [None]


async def test_a_shutdown_waits_for_tunnels_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with serve(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        config = configured(tmp_path, f"http://127.0.0.1:{port}", models=())
        client, ending, url = await _dialled_and_stopping(config)
        with pytest.raises(OSError):
            await _open(url)
        await client.send("still served")
        assert await within(client.recv()) == "still served"
        await client.close()
        assert client.close_code == CloseCode.NORMAL_CLOSURE
        await within(ending)


async def _dialled_and_stopping(config: Config) -> tuple[ClientConnection, asyncio.Future[None], str]:
    """A client whose proxy stops, and takes nobody new any more."""
    urls: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(config) as up:
            urls.set_result(up.data_url.replace("http:", "ws:") + PATH)
            await stop.wait()

    ending = asyncio.ensure_future(run())
    url = await urls
    client = await dial(url)
    await client.send("hello")
    assert await client.recv() == "hello"
    stop.set()
    async with asyncio.timeout(20):
        while True:  # the listener is closed a moment after the stop was called
            try:
                (await RawClient.connect(int(url.split(":")[2].split("/")[0]))).close()
            except OSError:
                break
            await asyncio.sleep(0.05)
    return client, ending, url


async def test_a_tunnel_that_outlasts_the_drain_is_cut_on_both_sides(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def handler(peer: ServerConnection) -> None:
        try:
            await echo(peer)
        finally:
            gone.set()

    async with serve(handler, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxied(tmp_path, f"http://127.0.0.1:{port}") as up:
            # This server does not wait: it cancels what is under way, as ours does when the drain is over.
            async with serve_app(create_data_app(up.runtime), http=HandoverProtocol) as own_port:
                client = await _open(f"ws://127.0.0.1:{own_port}{PATH}")
                await client.send("hello")
                assert await within(client.recv()) == "hello"
            with pytest.raises(ConnectionClosedError):
                await within(client.recv())
            await within(gone.wait())
