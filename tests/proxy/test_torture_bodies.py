"""Whatever a client sends as a body, the engine gets these bytes, by every road and in any framing."""

import gzip
import hashlib
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proxy.scripted_upstream import Exchange
from tests.proxy.torture import CHAT, ROADS, Torture, chat, unlabelled
from tests.proxy.toy_model import NAME

roads = st.sampled_from(ROADS)

# -- spellings of JSON that no writer of ours would choose ------------------------------------------------

numbers = st.sampled_from(["1e400", "-0.0", "1.10", "0.1e-7", "12345678901234567890123", "1E+2", "NaN", "-1"])
texts = st.one_of(
    st.text(max_size=6).map(json.dumps),
    st.text(max_size=6).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(
        [r'"\ud800"', r'"\udc00\ud800"', r'"\u0000"', r'"a\/b"', '"🦀"', r'"\"kv_lifecycle\":1"']
    ),
)
spaces = st.sampled_from(["", " ", "\n\t", "\r\n"])
values = st.recursive(
    numbers | texts | st.sampled_from(["null", "true", "[]", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{' , '.join(items)}]")
        | st.lists(st.tuples(texts, inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f"{name}:{value}" for name, value in pairs) + "}"
        )
    ),
    max_leaves=6,
)


@st.composite
def awkward_calls(draw: st.DrawFn) -> bytes:
    """Chat calls that can be followed, with unknown and duplicate members in odd spellings, in any order."""
    content = draw(texts)
    members = [
        f'"model"{draw(spaces)}:{draw(spaces)}"{NAME}"',
        f'"messages":[{draw(spaces)}{{"role":"user","content":{content},"x":{draw(values)}}}]',
    ]
    for name in draw(
        st.lists(st.sampled_from(['"a"', '"\\u0061"', '"n"', '"seed"', '"é"', '""']), max_size=4)
    ):
        members.append(f"{name}{draw(spaces)}:{draw(values)}")
    order = draw(st.permutations(members))
    text = draw(spaces) + "{" + f"{draw(spaces)},{draw(spaces)}".join(order) + "}" + draw(spaces)
    return text.encode("utf-8", "surrogatepass")


bodies = st.one_of(
    awkward_calls(),
    awkward_calls().map(lambda body: b"\xef\xbb\xbf" + body),
    awkward_calls().map(lambda body: body[: len(body) // 2]),
    st.binary(max_size=200),
)


async def echo(exchange: Exchange) -> None:
    body = await exchange.read_body()
    await exchange.respond(200, body, [(b"Content-Type", b"application/octet-stream")])


async def sent(torture: Torture, road: bytes, body: bytes, cuts: list[int] | None) -> bytes:
    """Send a body, with its length or in chunks cut at these places; what came back."""
    client = await torture.client()
    if cuts is None:
        await client.request(b"POST", road, [(b"Content-Type", b"application/json")], body)
    else:
        await client.request(b"POST", road, [(b"Transfer-Encoding", b"chunked")])
        places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
        for start, end in pairwise(places):
            await client.send(b"%x;ext=1\r\n%b\r\n" % (end - start, body[start:end]))
        await client.send(b"0\r\nX-Trailer: 1\r\n\r\n")
    response = await client.response()
    client.close()
    assert response.status == 200, response
    assert response.complete
    return response.body


@settings(max_examples=60)
@given(roads, bodies, st.none() | st.lists(st.integers(0, 1000), max_size=5))
def test_any_body_arrives_as_it_was_sent_and_so_does_the_answer(
    torture: Torture, road: bytes, body: bytes, cuts: list[int] | None
) -> None:
    torture.engine(echo)
    answer = torture.run(sent(torture, road, body, cuts))
    arrived = torture.arrived
    assert arrived.body == answer
    assert (unlabelled(answer) if road == CHAT else answer) == body
    assert not arrived.header(b"x-trailer")


CORPUS = {
    "duplicate keys": chat()[:-1] + b',"a":1,"a":2 ,"model":"toy"}',
    "lone surrogates": chat()[:-1] + b',"s":"\\ud800 \\udfff\\u0000"}',
    "1e400": chat()[:-1] + b',"n":1e400,"f":1.50,"i":' + b"9" * 5000 + b"}",
    "deep": chat()[:-1] + b',"d":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep messages": b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "BOM": b"\xef\xbb\xbf" + chat(),
    "UTF-16": chat().decode().encode("utf-16"),
    "UTF-32": chat().decode().encode("utf-32"),
    "two documents": chat() + chat(),
    "comma behind": chat()[:-1] + b",}",
    "not closed": b'{"messages":[{"role":"user","content":"hi"}',
    "not UTF-8": chat()[:-2] + b'\xff"}',
    "empty": b"",
    "gzip": gzip.compress(chat(), mtime=0),
    "own label": chat(session_id="mine"),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_arrives_by_every_road(torture: Torture, road: bytes, name: str) -> None:
    torture.engine(echo)
    body = CORPUS[name]
    answer = torture.run(sent(torture, road, body, None))
    if name.startswith("UTF-") and road == CHAT:
        # A label can only be put into it in UTF-8.
        assert json.loads(unlabelled(answer)) == json.loads(body)
    else:
        assert unlabelled(answer) == body


@pytest.mark.parametrize(("road", "chunked"), [(ROADS[0], True), (ROADS[1], False), (ROADS[2], True)])
def test_64_megabytes_arrive_by_every_road(torture: Torture, road: bytes, chunked: bool) -> None:
    async def digest(exchange: Exchange) -> None:
        body = unlabelled(await exchange.read_body())
        await exchange.respond(200, hashlib.sha256(body).hexdigest().encode())
        exchange.body = b""

    torture.engine(digest)
    body = chat(messages=[{"role": "tool", "content": "\u00e9 x" * (64 * 2**20 // 8)}])
    assert len(body) > 64 * 2**20
    answer = torture.run(sent(torture, road, body, [2**25, 2**26] if chunked else None))
    assert answer == hashlib.sha256(body).hexdigest().encode()
