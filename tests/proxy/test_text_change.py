"""In what two texts differ: one category, or none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.vocabulary import PrefixBreak
from proxy.text_change import flat_text, head_change, text_change, tools_change

BILLING = "x-anthropic-billing-header: cc_version=2.1.39.{}; cc_entrypoint=cli; cch={};"

PAIRS = [
    (PrefixBreak.BILLING, BILLING.format("c39", "56445"), BILLING.format("0d1", "0aaa9")),
    (PrefixBreak.TIMESTAMP, "Today's date: 2026-11-30", "Today's date: 2026-12-01"),
    (PrefixBreak.TIMESTAMP, "on Monday, November 30, 2026 02:03 PM", "on Tuesday, May 1, 2026 11:03 AM"),
    (PrefixBreak.TIMESTAMP, "Mon Nov 30 14:03:22 UTC 2026", "Mon Nov 30 14:03:23 UTC 2026"),
    (PrefixBreak.TIMESTAMP, "since 1764511402.123", "since 1764511999.5"),
    (PrefixBreak.COUNTDOWN, "Token usage: 35000/200000; 165000 remaining", "Token usage: 9/20; 1 remaining"),
    (PrefixBreak.COUNTDOWN, "165000 tokens left", "99 tokens left"),
    (PrefixBreak.NONCE, "7f3a9b2c-aaaa-4bbb-8ccc-123456789abc", "8f3a9b2c-aaaa-4bbb-8ccc-123456789abd"),
    (PrefixBreak.NONCE, "directory /srv/run-12ab34cd/src", "directory /srv/run-99ab34ce/src"),
    (PrefixBreak.COUNTER, "step 3 of 10", "step 12 of 10"),
    (None, "be kind", "be rude"),
    (None, "it is 2026-11-30 now", "it is now"),
    (None, "the same", "the same"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "one", "other"), PAIRS)
def test_a_small_difference_is_named(kind: PrefixBreak | None, one: str, other: str) -> None:
    before, behind = "An agent.\nWith rules, 12 of them.\n", "\nAnd more rules of 2026-01-01."
    for around in (("", ""), (before, behind), (before, ""), ("", behind)):
        texts = [f"{around[0]}{said}{around[1]}" for said in (one, other)]
        assert text_change(*texts) == text_change(*reversed(texts)) == kind


@given(st.sampled_from(PAIRS), st.text(st.characters(categories=["Ll"]), min_size=1, max_size=5))
def test_a_change_of_words_beside_it_is_never_called_small(
    pair: tuple[PrefixBreak | None, str, str], word: str
) -> None:
    _, one, other = pair
    assert text_change(f"{one}\nrule", f"{other}\nrule {word}") is None


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_two_texts_can_be_compared(one: str, other: str) -> None:
    assert text_change(one, one) is None
    assert text_change(one, other) == text_change(other, one)


@pytest.mark.parametrize(
    "text", ["a-", "0a", "tokens ", "a=", "1:", "2026-", "x-anthropic-billing-header:a="]
)
def test_long_texts_of_few_signs_take_milliseconds_not_hours(text: str) -> None:
    assert text_change(f"x{text * 20_000}y", f"z{text * 20_000}w") is None


def test_heads_differ_in_tools_their_order_the_system_prompt_or_settings() -> None:
    tools: list[dict[str, Any]] = [{"name": "a", "input_schema": {}}, {"name": "b", "input_schema": {}}]
    body: dict[str, Any] = {"tools": tools, "system": "Today's date: 2026-11-30", "model": "m"}
    assert head_change(body, {**body, "tools": tools[::-1]}) is PrefixBreak.TOOLS_ORDER
    assert head_change(body, {**body, "tools": tools[:1]}) is PrefixBreak.TOOLS
    assert head_change(body, {**body, "tools": None}) is PrefixBreak.TOOLS
    assert head_change(body, {**body, "system": "Today's date: 2026-12-01"}) is PrefixBreak.TIMESTAMP
    assert head_change(body, {**body, "system": "Something else"}) is PrefixBreak.SYSTEM
    assert head_change(body, {**body, "reasoning_effort": "low"}) is PrefixBreak.SETTINGS
    assert tools_change(tools, [dict(tool) for tool in tools]) is None


def test_cache_marks_and_their_places_are_no_text() -> None:
    plain = [{"type": "text", "text": "a"}]
    assert flat_text(plain) == flat_text([{**plain[0], "cache_control": {"type": "ephemeral"}}])
    deep: object = "x"
    for _ in range(5_000):
        deep = [deep]
    assert flat_text(deep) == ""
