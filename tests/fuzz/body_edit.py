"""Bodies that nobody would write, edited: `python -m tests.fuzz.body_edit --seconds 60`.

What a JSON parser reads out of the edited body is what it read before, but for the edit; what was no JSON is
not made any; and no byte changes that does not belong to the edit.
"""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.body_edit import RequestEdit, cut_engine_ids, edit_request
from proxy.json_members import NotScannable, scan_object
from proxy.sse import EventRewriter
from tests.fuzz.driver import run_for

NAMES = ["kv_lifecycle", "kv_transfer_params", "cache_salt", "session_id", "return_token_ids", "vllm_xargs"]
INNER = ["cached_token_stats", "lmcache.max_offload_tokens", "prompt_token_ids", "kv_transfer_params"]
ANSWER = ["choices", "index", "token_ids", "prompt_token_ids", "delta", "id"]


@st.composite
def spelled(draw: st.DrawFn, names: list[str]) -> str:
    """A quoted name, some of its letters escaped, perhaps with something before or behind it."""
    name = draw(st.sampled_from(names) | st.text(st.characters(codec=None), max_size=3))
    escaped = draw(st.integers(0, 255))
    letters = (
        f"\\u{ord(letter):04x}"
        if escaped >> at % 8 & 1 and ord(letter) < 0x10000
        else json.dumps(letter)[1:-1]
        for at, letter in enumerate(name)
    )
    return '"' + "".join(letters) + '"'


spaces = st.sampled_from(["", " ", "\n", "\t\r\n  "])
scalars = st.sampled_from(
    [
        "null",
        "true",
        "false",
        "0",
        "-0.0",
        "1e400",
        "NaN",
        "9" * 30,
        "9" * 5000,
        '"x"',
        '"}"',
        r'"\""',
        '"\\\\"',
        r'"\ud800"',
        '"é🦀"',
        '"\u2028"',
        '"\x7f"',
        r'"\u0000"',
        "[]",
        "{}",
        "[1,2]",
        "[[1],[2]]",
    ]
)


def documents(names: list[str], inner: list[str]) -> st.SearchStrategy[str]:
    """Objects of named and other members, duplicates included, in every spelling."""
    nested = st.recursive(scalars, lambda value: objects(inner, value) | arrays(value), max_leaves=8)
    return objects(names, nested)


def arrays(value: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(st.lists(value, max_size=3), spaces).map(
        lambda made: "[" + f"{made[1]},".join(made[0]) + "]"
    )


def objects(names: list[str], value: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.tuples(spaces, spelled(names), spaces, spaces, value, spaces).map(
        lambda m: f"{m[0]}{m[1]}{m[2]}:{m[3]}{m[4]}{m[5]}"
    )
    return st.tuples(st.lists(member, max_size=5), spaces).map(
        lambda made: "{" + (",".join(made[0]) or made[1]) + "}"
    )


def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """Cut off, doubled, with a byte changed, or as it is."""
    at = draw(st.integers(0, max(0, len(body) - 1)))
    match draw(st.integers(0, 6)):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + draw(st.binary(min_size=1, max_size=2)) + body[at + 1 :]
        case 2:
            return body[:at] + draw(st.sampled_from([b"}", b"{", b'"', b"\\", b",", b":", b"]"])) + body[at:]
        case 3:
            return body + draw(st.sampled_from([b"}", b"{}", b",", b"\x00", b"\xef\xbb\xbf", b" "]))
        case _:
            return body


ENCODINGS = [
    "utf-8",
    "utf-8",
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "utf-32-be",
]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Request bodies in the encodings that engines read, whole or damaged."""
    text = draw(spaces) + draw(documents(NAMES, INNER)) + draw(spaces)
    return damaged(draw, text.encode(draw(st.sampled_from(ENCODINGS)), "surrogatepass"))


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Answer bodies, whole or damaged."""
    return damaged(draw, draw(documents(ANSWER, ANSWER)).encode("utf-8", "surrogatepass"))


edits = st.builds(
    RequestEdit,
    fields=st.dictionaries(
        st.sampled_from(["cache_salt", "session_id", "return_token_ids"]), st.text(max_size=3)
    ),
    transfer_params=st.dictionaries(
        st.sampled_from(["lmcache.max_offload_tokens", "lmcache.kvt.ctx", "cached_token_stats"]),
        st.integers(0, 9),
    ),
)


def read(body: bytes) -> Any:
    """As an engine reads it, every member kept: objects are lists of pairs. None for what is no JSON."""
    try:
        return json.loads(body, object_pairs_hook=Pairs, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return None


class Pairs(list[tuple[str, Any]]):
    """An object's members in order, duplicates included."""


def last(document: Any, name: str) -> Any:
    found = [value for key, value in document if key == name] if isinstance(document, Pairs) else []
    return found[-1] if found else None


def is_subsequence(part: bytes, whole: bytes) -> bool:
    at = 0
    for byte in part:
        at = whole.find(byte, at) + 1
        if not at:
            return False
    return True


def as_utf8(body: bytes) -> bytes:
    encoding = json.detect_encoding(body[:4])
    if encoding.startswith("utf-8"):
        return body
    return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")


@given(bodies() | st.binary(max_size=80), edits)
def edited_bodies_read_alike(body: bytes, edit: RequestEdit) -> None:
    """The members that are not ours, with their order and their duplicates; ours as they shall be."""
    edited = edit_request(body, edit).body
    before, after = read(body), read(edited)
    if not isinstance(before, Pairs):
        if before is None:
            # It may become JSON only where a value that was cut out or replaced made it none.
            assert not isinstance(after, Pairs) or {m.name for m in scan_object(as_utf8(body)).members} & set(
                NAMES
            )
        else:
            assert edited == body
        return
    assert isinstance(after, Pairs)
    assert [m for m in after if m[0] not in NAMES] == [m for m in before if m[0] not in NAMES]
    assert last(after, "kv_lifecycle") is None
    for name in ("cache_salt", "session_id", "return_token_ids"):
        values = [value for key, value in after if key == name]
        if name in edit.fields:
            assert values == [edit.fields[name]]
        else:
            assert values == [value for key, value in before if key == name]
    for name, value in after:
        if name == "kv_transfer_params" and value is not None:
            assert isinstance(value, Pairs)
            for key, sent in value:
                wanted = key in edit.transfer_params and sent == str(edit.transfer_params[key])
                assert wanted or (key == "cached_token_stats" and isinstance(sent, bool))
        elif name == "vllm_xargs":
            assert last(value, "kv_transfer_params") is None
    if edit.transfer_params:
        (sent,) = [value for key, value in after if key == "kv_transfer_params"]
        assert {k: v for k, v in sent if k in edit.transfer_params} == {
            k: str(v) for k, v in edit.transfer_params.items()
        }


@given(bodies() | st.binary(max_size=80))
def without_an_edit_bytes_are_only_taken_out(body: bytes) -> None:
    """And none where nothing of ours stands."""
    result = edit_request(body)
    if result.body != body:
        assert is_subsequence(result.body, as_utf8(body))
        assert result.lifecycle is not None or result.dropped
    document = read(body)
    if isinstance(document, Pairs) and not {name for name, _ in document} & set(NAMES):
        assert result.body is body


@given(bodies() | st.binary(max_size=80), edits)
def twice_is_once(body: bytes, edit: RequestEdit) -> None:
    """A proxy behind a proxy changes nothing more."""
    for each in (RequestEdit(), edit):
        once = edit_request(body, each).body
        assert edit_request(once, each).body == once


@given(answers() | st.binary(max_size=80))
def ids_leave_an_answer_and_nothing_else_does(body: bytes) -> None:
    """Whatever the engine wrote."""
    cut = cut_engine_ids(body).body
    assert is_subsequence(cut, body)
    assert cut_engine_ids(cut).body == cut
    before, after = read(body), read(cut)
    # No engine spells its own names with escapes.
    if isinstance(before, Pairs) and b"\\u00" not in body:
        assert isinstance(after, Pairs)
        assert [m for m in after if m[0] != "choices"] == [
            m for m in before if m[0] not in ("choices", "prompt_token_ids")
        ]


@given(
    st.lists(answers().map(lambda body: b"data: " + body) | st.binary(max_size=20), max_size=4),
    st.lists(st.integers(0, 500), max_size=8),
)
def a_stream_is_cut_alike_however_it_arrives(lines: list[bytes], cuts: list[int]) -> None:
    """The rewriter over whole streams."""
    stream = b"\n\n".join(lines)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    whole, pieces = (EventRewriter(lambda data: cut_engine_ids(data).body) for _ in range(2))
    at_once = whole.feed(stream) + whole.close()
    assert b"".join(pieces.feed(stream[a:b]) for a, b in pairwise(places)) + pieces.close() == at_once


@given(st.binary(max_size=60) | bodies())
def members_lie_inside_the_document(body: bytes) -> None:
    """In order, apart from each other."""
    try:
        span = scan_object(body)
    except NotScannable:
        return
    at = span.start
    for member in span.members:
        assert at < member.start < member.value_start < member.end < span.end <= len(body)
        at = member.end


PROPERTIES = [
    edited_bodies_read_alike,
    without_an_edit_bytes_are_only_taken_out,
    twice_is_once,
    ids_leave_an_answer_and_nothing_else_does,
    a_stream_is_cut_alike_however_it_arrives,
    members_lie_inside_the_document,
]

if __name__ == "__main__":
    run_for(PROPERTIES)
