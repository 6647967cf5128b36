"""Where prompts leave the one before, and what it costs, against a count of the tokens themselves."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lifecycle.core.events import PrefixDiverged
from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.observations import Beside, CallMapping, PromptMapping, RemoveMessages, ReplaceMessages
from lifecycle.core.prefix_loss import NUM_KEPT, shared_chunks
from lifecycle.vocabulary import MappingKind, PrefixBreak
from tests.lifecycle.core.story import CHUNK, Story, keys_of, mapping_of, prompt_tokens, tokens_of

OLD = "s0 u1 a1 u2 a2 u3"


def tokens(words: str, head: str = "head", stripped: Sequence[str] = ()) -> list[str]:
    return [t for part in prompt_tokens(words.split(), head, stripped) for t in part]


def cost(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """Tokens of whole chunks that both begin with, and those lost of what stands where the old one stood."""
    ours, theirs = keys_of(old), keys_of(new)
    shared = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    kept = min(len(ours), len(theirs)) if shared is None else shared
    return kept * CHUNK, (min(len(ours), len(theirs)) - kept) * CHUNK


def diverged(story: Story) -> list[PrefixDiverged]:
    return [e for e in story.events if isinstance(e, PrefixDiverged)]


def only(story: Story) -> PrefixDiverged:
    (found,) = diverged(story)
    return found


def answered(words: str = OLD, answer: str = "") -> Story:
    story = Story()
    story.arrive(words)
    story.map()
    story.first()
    if answer:
        story.generate(answer)
    story.end()
    return story


def follow(
    story: Story,
    words: str,
    *,
    late: bool = False,
    change: PrefixBreak | None = None,
    head: str = "head",
    stripped: Sequence[str] = (),
) -> None:
    """The next call, whole; `late`: its first token comes before its tokens are known."""
    story.arrive(words, "c2", head=head)
    mapping = replace(mapping_of(words.split(), head, stripped), change=change)
    if late:
        story.first("c2")
    story.see(CallMapping(at_ns=story.now, call_id="c2", attempt=1, mapping=mapping))
    if not late:
        story.first("c2")
    story.end("c2")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("words", "kind", "index", "role"),
    [
        ("s0 u1 a1 u9 a2 u3 a3 u4", PrefixBreak.MESSAGE, 3, "user"),
        ("s9 u1 a1 u2 a2 u3 a3 u4", PrefixBreak.SYSTEM, 0, "system"),
        ("s0 u2 a2 u3 a3 u4", PrefixBreak.REMOVED, 1, "user"),
        ("s0 u1 u9 a1 u2 a2 u3 a3 u4", PrefixBreak.INSERTED, 2, "user"),
        ("s0 u1 a1", PrefixBreak.SHORTENED, 3, ""),
        ("s0 u1 a1 u2 a9 u3 a3 u4", PrefixBreak.MESSAGE, 4, "assistant"),
    ],
)
def test_an_undeclared_change_is_named_with_its_place_and_its_cost(
    words: str, kind: PrefixBreak, index: int, role: str, late: bool
) -> None:
    story = answered()
    follow(story, words, late=late)
    found = only(story)
    assert (found.kind, found.index, found.role, found.declared) == (kind, index, role, False)
    assert (found.shared_tokens, found.lost_tokens) == cost(tokens(OLD), tokens(words))
    lint = story.state.lint
    assert (lint.count, lint.lost_tokens, lint.declared) == (1, found.lost_tokens, 0)
    assert lint.last[0].call_id == "c2"


@pytest.mark.parametrize("late", [False, True])
def test_another_head_loses_everything(late: bool) -> None:
    story = answered()
    follow(story, f"{OLD} a3 u4", head="tools", late=late)
    found = only(story)
    assert (found.kind, found.index, found.role, found.shared_tokens) == (PrefixBreak.HEAD, -1, "", 0)
    assert found.lost_tokens == len(tokens(OLD)) // CHUNK * CHUNK


def test_the_texts_say_more_exactly_what_changed_but_not_what_was_removed() -> None:
    story = answered()
    follow(story, "s9 u1 a1 u2 a2 u3", change=PrefixBreak.TIMESTAMP)
    assert only(story).kind is PrefixBreak.TIMESTAMP
    story = answered()
    follow(story, "s0 u2 a2 u3", change=PrefixBreak.MESSAGE)
    assert only(story).kind is PrefixBreak.REMOVED


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("answer", ["", "a3"])
def test_a_list_that_goes_on_is_no_finding(answer: str, late: bool) -> None:
    story = answered(answer=answer)
    follow(story, f"{OLD} a3 u4", late=late)
    assert not diverged(story)
    assert story.state.lint.count == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("change", "kind"), [(PrefixBreak.ANSWER, PrefixBreak.ANSWER), (None, PrefixBreak.RENDERED)]
)
def test_an_answer_that_comes_back_as_other_tokens_loses_what_was_generated(
    change: PrefixBreak | None, kind: PrefixBreak, late: bool
) -> None:
    story = answered(answer="a3")
    follow(story, f"{OLD} a9 u4", change=change, late=late)
    found = only(story)
    assert (found.kind, found.index, found.role) == (kind, 6, "assistant")
    generated = tokens(OLD) + tokens_of("a3")[1:]
    assert (found.shared_tokens, found.lost_tokens) == cost(generated, tokens(f"{OLD} a9 u4"))
    assert found.lost_tokens > 0


@pytest.mark.parametrize("late", [False, True])
def test_an_answer_that_does_not_come_back_is_named_as_that(late: bool) -> None:
    story = answered(answer="a3")
    follow(story, f"{OLD} u4", late=late)
    found = only(story)
    assert (found.kind, found.index, found.role) == (PrefixBreak.ANSWER, 6, "user")


@pytest.mark.parametrize("late", [False, True])
def test_of_several_answers_one_that_comes_back_is_enough(late: bool) -> None:
    story = Story()
    story.arrive(OLD, num_choices=2)
    story.map()
    story.first()
    story.generate("a3", choice=0)
    story.generate("a9", choice=1)
    story.end()
    follow(story, f"{OLD} a9 u4", late=late)
    assert not diverged(story)


@pytest.mark.parametrize("late", [False, True])
def test_a_template_that_writes_an_old_message_otherwise_is_named(late: bool) -> None:
    story = answered()
    follow(story, f"{OLD} a3 u4", stripped=["a1"], late=late)
    found = only(story)
    assert (found.kind, found.index, found.role) == (PrefixBreak.RENDERED, 2, "assistant")
    known = tokens(OLD)[:-1]
    assert (found.shared_tokens, found.lost_tokens) == cost(known, tokens(f"{OLD} a3 u4", stripped=["a1"]))


def test_a_declared_edit_is_no_complaint_and_has_its_cost() -> None:
    story = answered()
    story.do(ReplaceMessages, span=(1, 3), n=1)
    follow(story, "s0 u9 u2 a2 u3 a3 u4")
    found = only(story)
    assert (found.kind, found.index, found.role) == (PrefixBreak.REPLACED, 1, "user")
    assert found.declared
    assert (found.shared_tokens, found.lost_tokens) == cost(tokens(OLD), tokens("s0 u9 u2 a2 u3 a3 u4"))
    lint = story.state.lint
    assert (lint.count, lint.lost_tokens) == (0, 0)
    assert (lint.declared, lint.declared_lost_tokens) == (1, found.lost_tokens)
    story.call("s0 u9 u2 a2 u3 a3 u4 a4 u5", "c3")
    assert story.state.lint.declared == 1, "it is told once"


def test_several_declared_edits_are_one_and_what_only_removes_is_told_so() -> None:
    story = answered()
    story.do(RemoveMessages, span=(3, 5))
    story.do(RemoveMessages, span=(1, 2))
    follow(story, "s0 a1 u3 a3 u4")
    found = only(story)
    assert (found.kind, found.index, found.declared) == (PrefixBreak.REMOVED, 1, True)


def test_a_change_in_front_of_a_declared_edit_is_undeclared() -> None:
    story = answered()
    story.do(ReplaceMessages, span=(3, 6), n=1)
    follow(story, "s0 u9 a1 u8")
    found = only(story)
    assert (found.kind, found.index, found.declared) == (PrefixBreak.MESSAGE, 1, False)


def test_without_tokens_the_place_is_known_and_the_cost_is_not() -> None:
    story = answered()
    story.arrive("s0 u1 a9", "c2")
    none = PromptMapping(kind=MappingKind.NONE, reason="an image", change=PrefixBreak.COUNTER)
    story.see(CallMapping(at_ns=story.now, call_id="c2", attempt=1, mapping=none))
    found = only(story)
    assert (found.kind, found.index) == (PrefixBreak.COUNTER, 2)
    assert (found.shared_tokens, found.lost_tokens) == (-1, -1)
    assert story.state.lint.lost_tokens == 0


def test_calls_side_by_side_and_one_offs_are_no_finding() -> None:
    story = answered()
    story.arrive(f"{OLD} a3 u4", "c2")
    story.arrive("s0 u9", "c3")
    for call in ("c2", "c3"):
        story.map(call)
        story.first(call)
        story.end(call)
    assert not diverged(story)
    once = Story(one_off=True)
    once.call("s0 u1")
    assert not diverged(once)


def test_a_new_contexts_head_is_compared_with_anothers_a_forks_is_not() -> None:
    beside = Beside(uid="other", kind=PrefixBreak.BILLING, index=-1, shared_tokens=8, lost_tokens=40)
    mapping = replace(mapping_of(["s0", "u1"]), beside=beside)
    story = Story()
    story.arrive("s0 u1")
    story.see(CallMapping(at_ns=story.now, call_id="c1", attempt=1, mapping=mapping))
    found = only(story)
    assert (found.against, found.kind, found.lost_tokens) == ("other", PrefixBreak.BILLING, 40)
    assert (story.state.lint.beside, story.state.lint.beside_lost_tokens, story.state.lint.count) == (
        1,
        40,
        0,
    )
    story.first()
    story.end()
    child = Story(parent=story, fork=True)
    child.arrive("s0 u1 u2")
    mapping = replace(mapping_of(["s0", "u1", "u2"]), beside=beside)
    child.see(CallMapping(at_ns=child.now, call_id="c1", attempt=1, mapping=mapping))
    assert not [e for e in diverged(child) if e.against]


def test_only_the_latest_findings_are_kept_and_all_are_counted() -> None:
    story = answered("s0 u1")
    for number in range(2, 24):
        story.call(f"s0 u{number}", f"c{number}")
    assert story.state.lint.count == 22
    assert [d.call_id for d in story.state.lint.last] == [f"c{n}" for n in range(24 - NUM_KEPT, 24)]


one_word = st.builds(lambda role, number: f"{role}{number}", st.sampled_from("uat"), st.integers(0, 5))
words = st.lists(one_word, max_size=6)


@settings(max_examples=60)
@given(words, words, st.booleans(), st.sampled_from(["head", "other"]))
def test_costs_are_those_of_the_tokens_whatever_the_lists(
    old: list[str], new: list[str], late: bool, head: str
) -> None:
    before, after = " ".join(["s0", *old]), " ".join(["s0", *new])
    story = answered(before)
    follow(story, after, late=late, head=head)
    goes_on = head == "head" and new[: len(old)] == old
    shared, lost = cost(tokens(before), tokens(after, head))
    grew = (head, len(new), new[:-1]) == ("head", len(old), old[:-1]) and lost == 0
    grew = grew and shared >= (len(tokens(before)) - 1) // CHUNK * CHUNK
    expected = lost > 0 or not (goes_on or grew)
    assert bool(diverged(story)) == expected, "an answer may be missing, a last message may have grown"
    for found in diverged(story):
        assert (found.shared_tokens, found.lost_tokens) == cost(tokens(before), tokens(after, head))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_chains_share_up_to_where_they_differ(shared: int, one: int, other: int) -> None:
    def chain(name: str, length: int) -> bytes:
        return b"".join(
            keys_of([str(n) for n in range(shared * CHUNK)] + [f"{name}{n}" for n in range(length * CHUNK)])
        )

    assert shared_chunks(chain("a", one), chain("b", other)) == shared
    assert len(chain("a", one)) == (shared + one) * KEY_BYTES
