"""Bodies with what normalisers look for, and without: which bytes change, and in whose calls."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.vocabulary import Mode
from proxy.config import Config, ModelConfig
from proxy.normalise import Normalised, Normalising, normalise
from proxy.normalisers import Normaliser, Voice, edited, edits
from tests.proxy.test_normalisers import BILLING

ALL = tuple(Normaliser)
HOLE = "@@"
MOMENT = "Current time: 2026-11-30T14:03:22Z"
REMINDER = "<system_warning>Token usage: 35000/200000; 165000 remaining</system_warning>"


def run(path: str, body: bytes, *kinds: Normaliser) -> Normalised:
    result = normalise(path, body, lambda model: kinds)
    assert normalise(path, result.body, lambda model: kinds) == Normalised(result.body), "twice is as once"
    return result


def text(said: str, **more: object) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


PARTS = [text("a", cache_control={"type": "ephemeral"}), text(HOLE)]
INPUT = [{"type": "input_text", "text": HOLE}]
RESULT = [{"type": "tool_result", "content": [text(HOLE)]}]
NAMED: list[tuple[str, Voice, dict[str, Any]]] = [
    ("/v1/chat/completions", Voice.SYSTEM, {"messages": [{"role": "system", "content": HOLE}]}),
    ("/v1/chat/completions", Voice.SYSTEM, {"messages": [{"content": PARTS, "role": "developer"}]}),
    ("/v1/chat/completions", Voice.USER, {"messages": [{"role": "user", "content": HOLE}], "n": 1}),
    ("/v1/messages", Voice.SYSTEM, {"system": HOLE, "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages", Voice.SYSTEM, {"max_tokens": 1, "system": PARTS}),
    ("/v1/messages", Voice.USER, {"messages": [{"role": "user", "content": PARTS}]}),
    ("/v1/responses", Voice.SYSTEM, {"instructions": HOLE, "input": "hi"}),
    ("/v1/responses", Voice.SYSTEM, {"input": [{"role": "developer", "content": INPUT}]}),
    ("/v1/responses", Voice.USER, {"input": HOLE}),
]  # fmt: skip
"""A document for each place that a normaliser may see, with a hole where its text is."""

OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": HOLE}]}),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "tool_call_id": "a", "content": HOLE}]}),
    ("/v1/chat/completions", {"tools": [{"function": {"description": HOLE}}], "messages": []}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": HOLE}]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": RESULT}]}),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [text(HOLE)]}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": HOLE}]}),
    ("/v1/responses", {"input": [{"type": "message", "role": "assistant", "content": HOLE}]}),
    ("/v1/completions", {"prompt": HOLE}),
    ("/v1/embeddings", {"input": HOLE}),
]  # fmt: skip

volatile = st.sampled_from([BILLING, MOMENT, "Remaining tokens: 12", REMINDER])
said = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["\n", "😀", "é\u2028", '"\\', "\ud83d"]
)
texts = st.lists(volatile | said, max_size=5).map("\n".join)
spacing = st.sampled_from([(",", ":"), (" ,\n ", " : "), (", ", ": ")])


@settings(max_examples=60)
@given(st.sampled_from(NAMED), texts, st.booleans(), spacing, st.sampled_from(["utf-8", "utf-8-sig"]))
def test_in_a_named_place_only_the_named_span_changes(
    named: tuple[str, Voice, dict[str, Any]],
    said: str,
    ascii_only: bool,
    spaces: tuple[str, str],
    coding: str,
) -> None:
    path, voice, document = named
    ascii_only = ascii_only or "\ud83d" in said
    frame = json.dumps({"x": 1e100, "model": "m", **document, "y": "é"}, separators=spaces)

    def body(spoken: str) -> bytes:
        literal = json.dumps(spoken, ensure_ascii=ascii_only)[1:-1]
        return frame.replace(HOLE, literal).encode(coding)

    changes = edits(ALL, voice, said)
    result = run(path, body(said), *ALL)
    assert result.body == body(edited(said, [change for _, change in changes]))
    assert sum(result.counts.values()) == len(changes)
    json.loads(result.body)


@settings(max_examples=60)
@given(st.sampled_from(OTHERS), texts, st.booleans())
def test_nothing_else_changes(other: tuple[str, dict[str, Any]], said: str, ascii_only: bool) -> None:
    path, document = other
    frame = json.dumps({"model": "m", **document})
    literal = json.dumps(said, ensure_ascii=ascii_only or "\ud83d" in said)[1:-1]
    body = frame.replace(HOLE, literal).encode()
    assert run(path, body, *ALL) == Normalised(body)


@settings(max_examples=60)
@given(
    st.binary()
    | st.recursive(
        st.none() | st.text() | st.floats(), lambda v: st.dictionaries(st.text(), v) | st.lists(v)
    ).map(lambda v: json.dumps(v).encode())
)
def test_what_is_no_call_passes(body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert run(path, body, *ALL) == Normalised(body)


def test_claudes_billing_block_goes_whole() -> None:
    blocks = [text(BILLING), text("You are an agent.", cache_control={"type": "ephemeral"})]
    body = json.dumps({"system": blocks, "messages": [{"role": "user", "content": "hi"}]}).encode()
    result = run("/v1/messages", body, Normaliser.CLAUDE_BILLING)
    assert result.body == body.replace(json.dumps(blocks[0]).encode() + b", ", b"")
    assert result.counts == {Normaliser.CLAUDE_BILLING: 1}
    alone = json.dumps({"system": blocks[:1]}).encode()
    assert run("/v1/messages", alone, Normaliser.CLAUDE_BILLING).body == alone.replace(BILLING.encode(), b"")


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_blocks_go_with_one_comma_each(places: tuple[int, ...]) -> None:
    blocks = [text(BILLING) if at in places else text(str(at)) for at in range(4)]
    body = json.dumps({"system": blocks}).encode()
    result = run("/v1/messages", body, Normaliser.CLAUDE_BILLING)
    left = [text(str(at)) for at in range(4) if at not in places]
    assert json.loads(result.body) == {"system": left}


def test_of_two_members_of_one_name_the_one_that_engines_read_counts() -> None:
    first, last = json.dumps(MOMENT), json.dumps(f"{MOMENT} sharp")
    body = f'{{"system":{first},"s\\u0079stem":{last},"messages":[]}}'.encode()
    result = run("/v1/messages", body, Normaliser.DATE_IN_SYSTEM)
    assert result.body == body.replace(b"T14:03:22Z sharp", b" sharp")


def test_a_body_in_another_encoding_becomes_utf_8_where_it_changes() -> None:
    document = {"system": f"é {HOLE}\n{MOMENT}", "messages": []}
    result = run("/v1/messages", json.dumps(document).encode("utf-16"), Normaliser.DATE_IN_SYSTEM)
    assert json.loads(result.body) == {**document, "system": f"é {HOLE}\nCurrent time: 2026-11-30"}
    untouched = json.dumps({"system": "é"}).encode("utf-16")
    assert run("/v1/messages", untouched, *ALL).body == untouched


def normalising(
    config: Config, heard: dict[Normaliser, int] | None = None, mode: Mode = Mode.OBSERVE
) -> Normalising:
    def changed(kind: Normaliser, times: int) -> None:
        if heard is not None:
            heard[kind] = heard.get(kind, 0) + times

    return Normalising(config, lambda model: model or "only", lambda model, tenant: mode, changed)


def dated(model: str, size: int = 0) -> bytes:
    return json.dumps({"model": model, "system": MOMENT, "messages": [], "pad": "x" * size}).encode()


async def test_each_model_gets_what_is_asked_for_it() -> None:
    config = Config(
        normalise=(Normaliser.DATE_IN_SYSTEM,),
        models=(ModelConfig(path="", name="left"), ModelConfig(path="", name="own", normalise=())),
    )
    heard: dict[Normaliser, int] = {}
    parts = normalising(config, heard)
    for model in ("left", "other", ""):
        assert (await parts.body("/v1/messages", "t", dated(model))).body != dated(model)
    assert (await parts.body("/v1/messages", "t", dated("own"))).body == dated("own")
    assert heard == {Normaliser.DATE_IN_SYSTEM: 3}


async def test_a_model_without_a_name_is_the_engines_own() -> None:
    config = Config(models=(ModelConfig(path="", normalise=(Normaliser.DATE_IN_SYSTEM,)),))
    assert (await normalising(config).body("/v1/messages", "t", dated("first"))).counts


async def test_large_bodies_are_changed_as_well() -> None:
    parts = normalising(Config(normalise=(Normaliser.DATE_IN_SYSTEM,)))
    body = dated("m", 100_000)
    assert (await parts.body("/v1/messages", "t", body)).body == body.replace(b"T14:03:22Z", b"")


async def test_in_bypass_and_unless_asked_for_nothing_is_changed() -> None:
    asked = Config(normalise=tuple(Normaliser))
    body = dated("m")
    assert (await normalising(asked, mode=Mode.BYPASS).body("/v1/messages", "t", body)).body is body
    assert (await normalising(Config()).body("/v1/messages", "t", body)).body is body
