"""What a model no longer sees by each normaliser, and that it is told nothing that is not so."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.normalisers import Normaliser, Voice, edited, edits, may_apply

BILLING = "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch=56445;"


def out(kind: Normaliser, text: str, voice: Voice = Voice.SYSTEM) -> str:
    return edited(text, [change for _, change in edits([kind], voice, text)])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (BILLING, ""),
        (f"{BILLING}\nYou are an agent.", "You are an agent."),
        (f"{BILLING}\r\nYou are an agent.", "You are an agent."),
        (f"{BILLING}You are an agent.", "You are an agent."),
        (f"A gateway's word.\n{BILLING}\n\nYou are an agent.", "A gateway's word.\n\nYou are an agent."),
        (f"{BILLING}{BILLING}\nrest", "rest"),
        ("x-anthropic-billing-header: cc_version=1; cch=7f", ""),
        ("x-anthropic-billing-header: cc_version=1; cch=7f\nrest", "rest"),
        ("x-anthropic-billing-header: of another form\nrest", "rest"),
        (f"A line that names {BILLING}", f"A line that names {BILLING}"),
    ],
)
def test_the_billing_line_goes_and_nothing_else(text: str, left: str) -> None:
    assert out(Normaliser.CLAUDE_BILLING, text) == left


def test_a_nonce_becomes_steady_and_its_line_stays() -> None:
    other = BILLING.replace("56445", "0aaa9")
    assert out(Normaliser.CCH_NONCE, BILLING) == out(Normaliser.CCH_NONCE, other)
    assert "cc_version=2.1.39.c39; cc_entrypoint=cli; cch=" in out(Normaliser.CCH_NONCE, BILLING)
    assert out(Normaliser.CCH_NONCE, "the branch cch=56445 of a cache") == "the branch cch=56445 of a cache"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Token usage: 35000/200000; 165000 remaining", "Token usage: not shown"),
        ("- Remaining tokens: 12,345. Be brief.", "- Remaining tokens: not shown. Be brief."),
        ("Context left: 45%\nnext", "Context left: not shown\nnext"),
        ("tokens remaining: 120k of 200k tokens", "tokens remaining: not shown"),
        ("<system_warning>Token usage: 5/9; 4 remaining", "<system_warning>Token usage: not shown"),
        ("Token usage is what you pay for.", "Token usage is what you pay for."),
        ("max_tokens: 12", "max_tokens: 12"),
    ],
)
def test_a_countdown_in_a_system_prompt_is_not_shown(text: str, left: str) -> None:
    assert out(Normaliser.TOKEN_COUNTDOWN, text) == left


def test_a_users_words_are_touched_only_in_a_reminder_that_is_a_countdown() -> None:
    reminder = "<system_warning>Token usage: 35000/200000; 165000 remaining</system_warning>"
    said = f"Why so slow?\n{reminder}"
    assert out(Normaliser.TOKEN_COUNTDOWN, said, Voice.USER) == (
        "Why so slow?\n<system_warning>Token usage: not shown</system_warning>"
    )
    for untouched in (
        "Remaining tokens: 5",
        "<system-reminder>Token usage: 5. Read the file again.</system-reminder>",
        "<note>Token usage: 5</note>",
        f"{BILLING}\nToday's date: 2026-11-30 14:03",
    ):
        for kind in Normaliser:
            assert out(kind, untouched, Voice.USER) == untouched


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Today's date: 2026-11-30", "Today's date: 2026-11-30"),
        ("Today's date: 2026-11-30 14:03:22", "Today's date: 2026-11-30"),
        ("Today’s date: 2026-11-30 14:03:22", "Today’s date: 2026-11-30"),
        ("Current time: 2026-11-30T14:03:22.123Z", "Current time: 2026-11-30"),
        (
            "The current date and time is Monday, November 30, 2026 02:03 PM UTC.",
            "The current date and time is Monday, November 30, 2026.",
        ),
        (
            "Conversation started: Tuesday, May 05, 2026 01:15 PM",
            "Conversation started: Tuesday, May 05, 2026",
        ),
        (
            "Current date: Mon Nov 30 2026 14:03:22 GMT+0000 (Coordinated Universal Time)",
            "Current date: Mon Nov 30 2026",
        ),
        ("Now: Mon Nov 30 14:03:22 UTC 2026", "Now: Mon Nov 30 2026"),
        ("<env>\n  Date: 11/30/2026, 2:03:22 PM\n</env>", "<env>\n  Date: 11/30/2026\n</env>"),
        ("Local time: 14:03", "Local time: (not shown)"),
        ("Current time: 14:03 on 2026-11-30", "Current time: (not shown) on 2026-11-30"),
    ],
)
def test_of_a_moment_the_day_stays(text: str, left: str) -> None:
    assert out(Normaliser.DATE_IN_SYSTEM, text) == left


@pytest.mark.parametrize(
    "text",
    [
        "Standup at 10:30 every day",
        "Now run it at 10:30",
        "Time limit: 10:30",
        "see 2026-11-30 14:03:22 ERROR",
    ],
)
def test_a_time_that_is_not_the_present_stays(text: str) -> None:
    assert out(Normaliser.DATE_IN_SYSTEM, text) == text


pieces = st.sampled_from(
    [
        *(
            BILLING,
            BILLING[:-1],
            BILLING[:28],
            "cch=0aaa9;",
            "Token usage: ",
            "remaining tokens = ",
            "tokens",
        ),
        *("35000/200000; ", "165000 remaining", "<system_warning>", "</system_warning>", "Current time: "),
        *(
            "Today's date is ",
            "2026-11-30",
            "T14:03:22Z",
            " 02:03 PM",
            "12:30",
            ":",
            "1",
            "\n",
            " ",
            "\r\n",
            ";",
        ),
    ]
)


@given(st.lists(pieces | st.text(max_size=3), max_size=12).map("".join), st.permutations(list(Normaliser)))
def test_twice_changes_nothing_and_edits_do_not_overlap(text: str, kinds: list[Normaliser]) -> None:
    for voice in Voice:
        found = [change for _, change in edits(kinds, voice, text)]
        assert all(a.end <= b.start for a, b in pairwise(found))
        assert edits(kinds, voice, edited(text, found)) == []
        if found:
            assert may_apply(kinds, text.encode("utf-8", "surrogatepass"))
