"""What the engine would parse out of an edited body, and that everything else is the client's own bytes."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.body_edit import OFF_LOOP_BYTES, RequestEdit, cut_engine_ids, edit_request, edit_request_body
from proxy.json_members import NotScannable, scan_object

SPECIAL = ("kv_lifecycle", "kv_transfer_params", "cache_salt", "session_id", "return_token_ids", "vllm_xargs")
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.sampled_from(['"', "\\", '\\"', "{", "}", "[,]", "\ud800", '"kv_lifecycle":1'])
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3))
transfer = st.one_of(
    values,
    st.dictionaries(
        st.sampled_from(["cached_token_stats", "lmcache.max_offload_tokens", "prompt_token_ids", "a"]),
        st.one_of(st.booleans(), st.just("x"), values),
    ),
)
spaces = st.sampled_from(["", " ", "\n", "\t \r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Objects with any names, duplicates, escaped spellings and whitespace."""
    members = draw(
        st.lists(
            st.tuples(st.sampled_from(SPECIAL) | st.text(max_size=4), values)
            | st.tuples(st.just("kv_transfer_params"), transfer)
            | st.tuples(st.just("vllm_xargs"), st.dictionaries(st.just("kv_transfer_params"), scalars)),
            max_size=6,
        )
    )
    texts = []
    for name, value in members:
        quoted = json.dumps(name)
        if name and name.isascii() and name.isalpha() and draw(st.booleans()):
            quoted = '"' + "".join(f"\\u{ord(c):04x}" for c in name) + '"'
        ascii_only = draw(st.booleans())
        text = json.dumps(value, ensure_ascii=ascii_only)
        texts.append(f"{draw(spaces)}{quoted}{draw(spaces)}:{draw(spaces)}{text}{draw(spaces)}")
    return f"{draw(spaces)}{{{','.join(texts) or draw(spaces)}}}{draw(spaces)}".encode(
        "utf-8", "surrogatepass"
    )


edits = st.builds(
    RequestEdit,
    fields=st.dictionaries(st.sampled_from(["cache_salt", "session_id", "return_token_ids"]), st.text()),
    transfer_params=st.dictionaries(
        st.sampled_from(["lmcache.max_offload_tokens", "lmcache.kvt.ctx", "cached_token_stats"]),
        st.integers(),
    ),
)


def load(body: bytes) -> dict[str, Any]:
    """As an engine reads it: the last of several members of one name counts."""
    document = json.loads(body)
    assert isinstance(document, dict)
    return document


def expected(body: bytes, edit: RequestEdit) -> dict[str, Any]:
    document = load(body)
    document.pop("kv_lifecycle", None)
    sent = document.get("kv_transfer_params")
    if isinstance(sent, dict):
        allowed = {k: v for k, v in sent.items() if k == "cached_token_stats" and isinstance(v, bool)}
        if sent and not allowed and not edit.transfer_params:
            del document["kv_transfer_params"]
        else:
            document["kv_transfer_params"] = allowed | dict(edit.transfer_params)
    elif edit.transfer_params:
        document["kv_transfer_params"] = dict(edit.transfer_params)
    elif sent is not None:
        del document["kv_transfer_params"]
    if isinstance(document.get("vllm_xargs"), dict):
        document["vllm_xargs"].pop("kv_transfer_params", None)
    return document | dict(edit.fields)


def raw_members(body: bytes) -> list[tuple[bytes, bytes]]:
    """Name and value of every member we never touch, as bytes, in order."""
    root = scan_object(body)
    return [
        (body[m.start : m.value_start], body[m.value_start : m.end])
        for m in root.members
        if m.name not in SPECIAL
    ]


@given(bodies(), edits)
@example(b'{"kv_transfer_params":{},"kv_transfer_params":{"lmcache.x":"1"}}', RequestEdit())
@example(b'{"kv_lifecycle":1,"kv_lifecycle":2}', RequestEdit(fields={"cache_salt": "s"}))
def test_the_engine_parses_exactly_the_edited_document(body: bytes, edit: RequestEdit) -> None:
    edited = edit_request(body, edit).body
    got, want = load(edited), expected(body, edit)
    if "kv_transfer_params" not in want and got.get("kv_transfer_params") is not None:
        # an earlier duplicate stands where the last one left: filtered as well
        assert set(got.pop("kv_transfer_params")) <= {"cached_token_stats"}
    elif got.get("kv_transfer_params", 0) is None:
        del got["kv_transfer_params"]
        want.pop("kv_transfer_params", None)
    assert got == want
    assert raw_members(edited) == raw_members(body)


@given(bodies(), edits)
def test_no_member_of_an_edited_name_survives_in_any_spelling(body: bytes, edit: RequestEdit) -> None:
    edited = edit_request(body, edit).body
    for member in scan_object(edited).members:
        assert member.name != "kv_lifecycle"
        value = json.loads(edited[member.value_start : member.end])
        if member.name == "kv_transfer_params":
            assert value is None or set(value) <= {"cached_token_stats"} | set(edit.transfer_params)
            for key in set(value or ()) - set(edit.transfer_params):
                assert isinstance(value[key], bool)
        elif member.name == "vllm_xargs" and isinstance(value, dict):
            assert "kv_transfer_params" not in value
        elif member.name in edit.fields:
            assert value == edit.fields[member.name]


@given(st.dictionaries(st.text(), values).map(lambda d: {k: v for k, v in d.items() if k not in SPECIAL}))
def test_an_untouched_request_keeps_every_byte(document: dict[str, Any]) -> None:
    body = json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert edit_request(body).body is body


@given(st.binary())
@example(b"[1]")
@example(b'{"kv_lifecycle": {"a": 1}')
@example(b'{"kv_lifecycle" 1}')
@example(b'{"kv_transfer_params": {"a": ]}')
@example(b"")
def test_what_is_no_object_passes_untouched(body: bytes) -> None:
    try:
        scan_object(body)
    except NotScannable:
        assert edit_request(body, RequestEdit(fields={"cache_salt": "s"})).body == body


AWKWARD = (
    b'{"a":1e400,"a":-0.0,"a":1.10,"n":12345678901234567890123,"s":"\\ud800","k":NaN ,'
    b'"kv_lifecycle":{"x":["}"]},"messages":[{"role":"user","content":"\\"kv_lifecycle\\":1 {["}] }'
)


def test_awkward_numbers_and_strings_survive_a_cut() -> None:
    result = edit_request(AWKWARD)
    assert result.body == AWKWARD.replace(b',"kv_lifecycle":{"x":["}"]}', b"")
    assert result.lifecycle == b'{"x":["}"]}'


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_no_encoding_carries_a_forbidden_key_past(encoding: str) -> None:
    text = '{"m":"é","kv_transfer_params":{"lmcache.max_offload_tokens":"x","cached_token_stats":true}}'
    result = edit_request(text.encode(encoding))
    assert load(result.body) == {"m": "é", "kv_transfer_params": {"cached_token_stats": True}}
    assert result.dropped == ("lmcache.max_offload_tokens",)
    harmless = '{"m":"é"}'.encode(encoding)
    assert edit_request(harmless).body == harmless


def test_depth_does_not_matter() -> None:
    deep = b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b',"kv_lifecycle":0}'
    assert edit_request(deep).body == deep.replace(b',"kv_lifecycle":0', b"")


async def test_large_bodies_are_edited_alike() -> None:
    body = b'{"kv_lifecycle":0,"a":"' + b"x" * OFF_LOOP_BYTES + b'"}'
    assert await edit_request_body(body) == edit_request(body)
    assert await edit_request_body(b"{}") == edit_request(b"{}")


def test_only_named_fields_can_be_set() -> None:
    with pytest.raises(ValueError, match="model"):
        edit_request(b"{}", RequestEdit(fields={"model": "x"}))


ids = st.lists(st.integers(0, 2**31), max_size=4)


@given(
    st.none() | ids,
    st.lists(st.tuples(st.none() | ids, st.text(max_size=5)), max_size=3),
    st.integers(0, 3),
    st.sampled_from([None, 2]),
)
def test_engine_ids_leave_the_answer_and_come_back(
    prompt: list[int] | None, choices: list[tuple[list[int] | None, str]], first: int, indent: int | None
) -> None:
    answer: dict[str, Any] = {"id": "x", "choices": []}
    plain: dict[str, Any] = {"id": "x", "choices": []}
    for number, (tokens, text) in enumerate(choices):
        choice = {"index": first + number, "delta": {"content": text}}
        plain["choices"].append(choice)
        answer["choices"].append(
            {**choice, "token_ids": tokens} if number % 2 else {"token_ids": tokens, **choice}
        )
    answer["prompt_token_ids"] = prompt
    cut = cut_engine_ids(json.dumps(answer, indent=indent).encode())
    assert load(cut.body) == plain
    assert cut.prompt == (None if prompt is None else tuple(prompt))
    assert cut.tokens == {first + n: tuple(t) for n, (t, _) in enumerate(choices) if t is not None}


@given(st.binary())
def test_cutting_ids_out_of_anything_else_changes_nothing(body: bytes) -> None:
    assert cut_engine_ids(body).body == body
