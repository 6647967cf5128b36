"""One connection: framing, what ends it, what lets it be used again, and who waits for whom."""

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine_connection import HIGH_WATER_BYTES, MAX_HEAD_BYTES
from proxy.errors import ConnectFailed, InvalidRequest, UpstreamBroken
from proxy.upstream import PooledUpstream, UpstreamRequest, UpstreamResponse, UpstreamTarget
from tests.proxy.scripted_upstream import Exchange, Script, ScriptedUpstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
AGAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nagain"


def saying(*answers: bytes, close: bool = False) -> Script:
    """One answer an exchange, exactly these bytes; with `close` each is the connection's last."""
    left = list(answers)

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.write(left.pop(0))
        if close:
            exchange.cut()

    return script


def request(method: str = "POST", body: bytes | AsyncIterator[bytes] | None = b"{}") -> UpstreamRequest:
    return UpstreamRequest(method=method, raw_target=b"/x", headers=[], body=body)


async def whole(response: UpstreamResponse) -> bytes:
    body = b""
    while piece := await response.read():
        body += piece
    assert response.at_end()
    response.close()
    return body


async def ask(upstream: PooledUpstream, method: str = "POST") -> tuple[int, bytes]:
    response = await upstream.open(request(method))
    return response.status, await whole(response)


@pytest.mark.parametrize(
    "interim",
    [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"],
)
async def test_interim_answers_are_not_the_answer(interim: bytes) -> None:
    async with ScriptedUpstream(saying(interim + interim + OK, AGAIN)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        response = await upstream.open(request())
        assert (response.status, list(response.headers)) == (200, [(b"content-length", b"2")])
        assert await whole(response) == b"ok"
        assert await ask(upstream) == (200, b"again")
        assert engine.num_connections == 1
        await upstream.close()


async def test_an_answer_to_head_has_a_length_and_no_body() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"
    async with ScriptedUpstream(saying(head, AGAIN)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        response = await upstream.open(UpstreamRequest(method="HEAD", raw_target=b"/x", headers=[]))
        assert response.at_end()
        assert await whole(response) == b""
        assert await ask(upstream) == (200, b"again")
        await upstream.close()


async def test_trailers_are_dropped_and_the_connection_goes_on() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n"
    async with ScriptedUpstream(saying(chunked, AGAIN)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        response = await upstream.open(request())
        assert list(response.headers) == []
        assert await whole(response) == b"ok"
        assert list(response.headers) == []
        assert await ask(upstream) == (200, b"again")
        assert engine.num_connections == 1
        await upstream.close()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    unframed = b"HTTP/1.1 200 OK\r\n\r\nall of it"
    async with ScriptedUpstream(saying(unframed, AGAIN, close=True)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        assert await ask(upstream) == (200, b"all of it")
        assert await ask(upstream) == (200, b"again")
        assert engine.num_connections == 2
        await upstream.close()


@pytest.mark.parametrize("said", [OK + b"HTTP/1.1 200 OK\r\n", OK + b"garbage", OK + AGAIN])
async def test_what_follows_an_answer_unasked_is_nobodys_answer(said: bytes) -> None:
    async with ScriptedUpstream(saying(said, AGAIN)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        assert await ask(upstream) == (200, b"ok")
        assert await ask(upstream) == (200, b"again")
        assert engine.num_connections == 2
        await upstream.close()


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: two\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * (MAX_HEAD_BYTES + 1),
    ],
)
async def test_what_is_not_an_answer_breaks_the_exchange(said: bytes) -> None:
    async with ScriptedUpstream(saying(said, OK)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        with pytest.raises(UpstreamBroken):
            await ask(upstream)
        assert await ask(upstream) == (200, b"ok")
        await upstream.close()


async def test_bad_framing_in_mid_body_comes_behind_what_had_arrived() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.start_stream()
        await exchange.chunk(b"good")
        await go_on.wait()
        await exchange.write(b"zz\r\nbad\r\n")

    go_on = asyncio.Event()
    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        response = await upstream.open(request())
        assert await response.read() == b"good"
        go_on.set()
        with pytest.raises(UpstreamBroken):
            await response.read()
        assert not response.at_end()
        await upstream.close()


async def test_a_reader_who_pauses_stops_the_engine_not_the_memory() -> None:
    piece = b"x" * 65536
    num_sent = 0
    stuck = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal num_sent
        await exchange.read_body()
        await exchange.head(200)
        for _ in range(400):
            num_sent += 1
            exchange.writer.write(piece)
            # More waits here than any socket's buffer holds: the other side has stopped reading.
            if exchange.writer.transport.get_write_buffer_size() > 4 * len(piece):
                stuck.set()
            else:
                continue
            await exchange.writer.drain()
        exchange.cut()

    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        response = await upstream.open(request())
        await asyncio.wait_for(stuck.wait(), 10)
        held = await response.read()
        assert len(held) <= HIGH_WATER_BYTES + 2**20
        assert len(held) + len(await whole(response)) == 400 * len(piece)
        await upstream.close()


async def test_an_early_answer_ends_an_upload_and_its_connection() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    async def script(exchange: Exchange) -> None:
        if exchange.header(b"transfer-encoding"):
            await exchange.respond(413, b"too much")
            while await exchange.reader.read(65536):
                pass
            given_up.set()
            return
        await exchange.read_body()
        await exchange.respond(200, b"next")

    given_up = asyncio.Event()
    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        response = await upstream.open(request(body=pieces()))
        assert (response.status, await whole(response)) == (413, b"too much")
        await asyncio.wait_for(given_up.wait(), 10)
        assert await ask(upstream) == (200, b"next")
        assert engine.num_connections == 2
        await upstream.close()


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb"])
async def test_a_header_cannot_bring_another_one(value: bytes) -> None:
    async with ScriptedUpstream(saying(OK)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        with pytest.raises(InvalidRequest):
            await upstream.open(UpstreamRequest(method="GET", raw_target=b"/x", headers=[(b"x-one", value)]))
        assert engine.exchanges == []
        await upstream.close()


async def test_headers_and_target_go_out_as_they_came() -> None:
    headers = [(b"x-b", b"caf\xe9 \xc3\xa9"), (b"x-a", b"1"), (b"x-b", b""), (b"content-length", b"0")]
    async with ScriptedUpstream(saying(OK)) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(f"{engine.url}/pre/v1"))
        await whole(
            await upstream.open(UpstreamRequest(method="PUT", raw_target=b"//a%2Fb?c=%20", headers=headers))
        )
        (exchange,) = engine.exchanges
        assert (exchange.method, exchange.target) == ("PUT", b"/pre//a%2Fb?c=%20")
        assert exchange.headers == [(b"host", f"127.0.0.1:{engine.port}".encode()), *headers]
        await upstream.close()


async def test_an_idle_connection_is_closed_in_time() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, b"ok")
        await exchange.hung_up.wait()

    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url), keepalive_seconds=0.05)
        assert await ask(upstream) == (200, b"ok")
        await asyncio.wait_for(engine.exchanges[0].hung_up.wait(), 10)
        await upstream.close()


@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=6), st.lists(st.integers(1, 400), max_size=12))
@settings(max_examples=25)
async def test_however_an_answer_is_cut_it_is_the_same(chunks: list[bytes], cuts: list[int]) -> None:
    wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    wire += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        at = 0
        for cut in cuts:
            await exchange.write(wire[at : at + cut])
            await asyncio.sleep(0)
            at += cut
        await exchange.write(wire[at:])

    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        for _ in range(2):
            assert await ask(upstream) == (200, b"".join(chunks))
        assert engine.num_connections == 1
        await upstream.close()


def _certificate(directory: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files


async def test_an_engine_behind_tls_is_reached_if_its_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = _certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    get = UpstreamRequest(method="GET", raw_target=b"/x", headers=[])
    stranger = PooledUpstream(UpstreamTarget.parse(url))
    with pytest.raises(ConnectFailed):
        await stranger.open(get)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    upstream = PooledUpstream(UpstreamTarget.parse(url))
    assert await whole(await upstream.open(get)) == b"ok"
    await upstream.close()
    await stranger.close()
    server.close()
