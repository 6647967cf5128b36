"""Which differences between the two ways count, and what an explanation covers."""

from pathlib import Path

import pytest

from suites.__main__ import EXPLAINED
from suites.verdicts import ABSENT, Explanation, Verdict, differences, explain, read_explanations

ANSWER = Verdict("passed", {"answer": {"text": "a"}, "headers": {"server": "uvicorn"}})


def test_equal_verdicts_are_no_difference():
    assert differences("s", {"one": ANSWER}, {"one": Verdict("passed", dict(ANSWER.saw))}) == []


@pytest.mark.parametrize(
    ("through", "parts"),
    [
        (Verdict("failed", ANSWER.saw), ["verdict"]),
        (Verdict("passed", {**ANSWER.saw, "answer": {"text": "b"}}), ["answer"]),
        (Verdict("passed", {"answer": {"text": "a"}}), ["headers"]),
        (Verdict("failed", {"message": "x"}), ["verdict", "answer", "headers", "message"]),
    ],
)
def test_a_difference_names_what_differs(through, parts):
    (found,) = differences("s", {"one": ANSWER}, {"one": through})
    assert found.parts == parts


def test_a_case_that_ran_on_one_way_only_is_a_difference():
    missing, more = differences("s", {"one": ANSWER}, {"two": ANSWER})
    assert (missing.through.outcome, more.direct.outcome) == (ABSENT, ABSENT)


@pytest.mark.parametrize(
    ("suite", "case", "parts", "covered"),
    [
        ("s", "one", ("headers",), True),
        ("s*", "o*", ("*",), True),
        ("s", "one", ("answer", "headers"), True),
        ("s", "one", ("answer",), False),
        ("s", "two", ("headers",), False),
        ("other", "one", ("headers",), False),
    ],
)
def test_an_explanation_covers_only_what_it_names(suite, case, parts, covered):
    (found,) = differences("s", {"one": ANSWER}, {"one": Verdict("passed", {"answer": {"text": "a"}})})
    explanation = Explanation(suite, case, parts, "looked at")
    assert explain([found], [explanation]) == [(found, explanation if covered else None)]


def test_what_differs_in_one_thing_more_is_new():
    (found,) = differences("s", {"one": ANSWER}, {"one": Verdict("failed", {"answer": {"text": "a"}})})
    assert explain([found], [Explanation("s", "one", ("headers",), "looked at")])[0][1] is None


def test_the_reviewed_file_can_be_read():
    assert all(each.reason for each in read_explanations(EXPLAINED))


@pytest.mark.parametrize(
    "entry",
    [
        'suite = "s"\ncase = "c"\nparts = ["p"]',
        'suite = "s"\ncase = "c"\nparts = ["p"]\nreason = " "',
        'suite = "s"\ncase = "c"\nreason = "r"',
        'suite = "s"\ncase = "c"\nparts = ["p"]\nreason = "r"\nparst = ["q"]',
    ],
)
def test_an_entry_without_a_reason_or_misspelt_is_refused(entry, tmp_path: Path):
    written = tmp_path / "explained.toml"
    written.write_text(f"[[difference]]\n{entry}\n")
    with pytest.raises(ValueError, match=r"explained\.toml"):
        read_explanations(written)
