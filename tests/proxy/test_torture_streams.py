"""Answers in every shape an engine or a network gives them: the same bytes reach the client, at once."""

import asyncio
import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.vocabulary import CallEnd
from tests.proxy.scripted_upstream import DONE, Exchange, chat_answer, chat_chunks, sse
from tests.proxy.test_forward_streams import TORTURE
from tests.proxy.torture import CHAT, ROADS, Torture, chat, named

STREAM = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
FRAMINGS = ("chunked", "sized", "until close", "until half-close")


async def answer(
    exchange: Exchange, pieces: list[bytes], framing: str, headers: list[tuple[bytes, bytes]]
) -> None:
    """Write the pieces, each by itself, as a body of this framing."""
    body = b"".join(pieces)
    if framing == "chunked":
        headers = [*headers, (b"Transfer-Encoding", b"chunked")]
    elif framing == "sized":
        headers = [*headers, (b"Content-Length", b"%d" % len(body))]
    await exchange.head(200, headers)
    for piece in pieces:
        if framing == "chunked":
            await exchange.chunk(piece)
        else:
            await exchange.write(piece)
        await asyncio.sleep(0)
    if framing == "chunked":
        await exchange.write(b"0\r\nX-Trailer: 1\r\n\r\n")
    elif framing == "until close":
        exchange.cut()
    elif framing == "until half-close":
        exchange.writer.write_eof()
        exchange.keep_alive = False
        await exchange.hung_up.wait()


def answering(pieces: list[bytes], framing: str, headers: list[tuple[bytes, bytes]] = STREAM):
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await answer(exchange, pieces, framing, headers)

    return script


async def asked(torture: Torture, road: bytes, call: str = "", **fields: object):
    client = await torture.client()
    await client.request(b"POST", road, named("stream", call) if call else (), chat(**fields))
    response = await client.response()
    client.close()
    return response


lines = st.one_of(
    st.sampled_from(
        [b": keep-alive", b"event: x", b"id: 7", b"retry: 10", b"data", b"data:", b"data: [DONE]"]
    ),
    st.text(st.characters(exclude_characters="\r\n"), max_size=10).map(
        lambda text: b"data: " + text.encode("utf-8", "surrogatepass")
    ),
    st.builds(
        lambda text: sse({"choices": [{"index": 0, "delta": {"content": text}}]}).rstrip(),
        st.sampled_from(["a", "🦀é", "\u2028", ""]),
    ),
    st.binary(max_size=8),
)
ends = st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b""])
streams = st.lists(st.tuples(lines, ends), max_size=8).map(lambda parts: b"".join(a + b for a, b in parts))


@settings(max_examples=60)
@given(st.sampled_from(ROADS), streams, st.lists(st.integers(0, 200), max_size=10), st.sampled_from(FRAMINGS))
def test_any_stream_cut_anywhere_reaches_the_client(
    torture: Torture, road: bytes, stream: bytes, cuts: list[int], framing: str
) -> None:
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    pieces = [stream[a:b] for a, b in pairwise(places)]
    torture.engine(answering(pieces, framing))
    response = torture.run(asked(torture, road, stream=True))
    assert (response.status, response.body, response.complete) == (200, stream, True)
    assert not response.header(b"x-trailer")


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", TORTURE)
def test_the_corpus_of_streams(torture: Torture, name: str, framing: str) -> None:
    torture.engine(answering(TORTURE[name], framing))
    call = f"{name}, {framing}"
    response = torture.run(asked(torture, CHAT, call, stream=True))
    assert response.complete
    assert response.body == b"".join(TORTURE[name])
    assert torture.run(torture.end_of(call)) is CallEnd.COMPLETED


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd"])
def test_a_coded_answer_keeps_its_coding_and_its_bytes(torture: Torture, coding: bytes) -> None:
    body = gzip.compress(json.dumps(chat_answer("Hello")).encode(), mtime=0)
    for content_type in (b"application/json", b"text/event-stream"):
        headers = [
            (b"Content-Type", content_type),
            (b"Content-Encoding", coding),
            (b"Vary", b"Accept-Encoding"),
        ]
        torture.engine(answering([body[:9], body[9:]], "chunked", headers))
        for road in ROADS:
            response = torture.run(asked(torture, road))
            assert response.body == body
            assert response.header(b"content-encoding") == [coding]


def test_each_piece_arrives_before_the_engine_says_the_next(torture: Torture) -> None:
    """Also the half of a character, the half of a line end and the half of an event."""
    stream = b"".join(chat_chunks(["🦀", "b"])).replace(b"\n", b"\r\n")
    pieces = [stream[at : at + 7] for at in range(0, len(stream), 7)]
    read = asyncio.Semaphore(0)

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.start_stream()
        for piece in pieces:
            await exchange.chunk(piece)
            await read.acquire()
        await exchange.end_stream()

    async def client_reads() -> None:
        client = await torture.client()
        await client.request(b"POST", CHAT, (), chat(stream=True))
        await client.read_head()
        for piece in pieces:
            assert await client.read_chunk() == piece
            read.release()
        assert await client.read_chunk() == b""
        client.close()

    torture.engine(script)
    torture.run(client_reads())


def test_usage_and_unknown_members_are_not_touched(torture: Torture) -> None:
    odd = b'{"usage": {"prompt_tokens_details":{"cached_tokens":0 , "x":1e400}}, "choices":[] ,"y":1,"y":2}\n'
    torture.engine(answering([odd], "sized", [(b"Content-Type", b"application/json")]))
    for road in ROADS:
        assert torture.run(asked(torture, road)).body == odd


def test_an_error_in_a_stream_is_the_engines_and_no_end_is_added(torture: Torture) -> None:
    pieces = [*chat_chunks(["a"])[:2], b'data: {"error": {"message": "out of blocks", "code": 500}}\n\n']
    torture.engine(answering(pieces, "chunked"))
    response = torture.run(asked(torture, CHAT, "error in a stream", stream=True))
    assert response.body == b"".join(pieces)
    assert DONE not in response.body
    assert torture.run(torture.end_of("error in a stream")) is CallEnd.FAILED
