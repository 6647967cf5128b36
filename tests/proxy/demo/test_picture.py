"""The page says what it is: simulated or measured, from which command, with which caveats."""

from html.parser import HTMLParser

import pytest

from proxy.demo.picture import Setting, page
from proxy.demo.results import CallResult, Outcome, Sample, Step


class Text(HTMLParser):
    """Text of the page, and every tag that was opened and not closed."""

    VOID = frozenset({"meta", "br", "rect", "line", "polyline", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outcome(title: str) -> Outcome:
    samples = [
        Sample(
            at_seconds=float(at),
            resident_tokens=1000,
            dead_tokens=10 * at,
            num_calls=at,
            prompt_tokens=100 * at,
            cached_tokens=50 * at,
        )
        for at in range(9)
    ]
    calls = [
        CallResult(
            at_seconds=float(at),
            ttft_seconds=at / 10,
            prompt_tokens=100,
            cached_tokens=50,
            output_tokens=7,
        )
        for at in range(9)
    ]
    return Outcome(title=title, what=f"how {title} works", samples=samples, calls=calls)


def setting(*, simulated: bool) -> Setting:
    return Setting(
        simulated=simulated,
        workload="nine calls <of> one agent",
        hardware="a machine",
        command="kvtether demo --seed 7",
        caveats=["tools do not hurry"],
    )


STEPS = [Step(title="Before.", text="all of it", alive=5, dead=0, gone=0)]


def read(html: str) -> Text:
    found = Text()
    found.feed(html)
    assert not found.open
    return found


@pytest.mark.parametrize("simulated", [True, False])
def test_every_time_is_marked(simulated: bool) -> None:
    text = read(page(setting(simulated=simulated), [outcome("one"), outcome("two")], STEPS)).text
    ours, theirs = ("SIMULATED", "MEASURED") if simulated else ("MEASURED", "SIMULATED")
    assert text.count(ours) >= 3
    assert theirs not in text
    assert text.count(f"{ours.lower()} seconds") == 3


def test_the_page_can_be_made_again_from_what_it_says() -> None:
    text = read(page(setting(simulated=True), [outcome("one"), outcome("two")], STEPS)).text
    for said in (
        "kvtether demo --seed 7",
        "nine calls <of> one agent",
        "tools do not hurry",
        "how two works",
    ):
        assert said in text


def test_without_a_followed_compaction_there_is_no_section_for_it() -> None:
    text = read(page(setting(simulated=True), [outcome("one")], [])).text
    assert "compaction" not in text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = page(setting(simulated=True), [outcome("one")], STEPS)
    assert "http" not in html
    assert not {"script", "link", "img", "iframe"} & set(read(html).tags)
