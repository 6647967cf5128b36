"""Several prompts of one request: each hears of its own answers."""

from proxy.answer_facts import AnswerFacts, ChoiceFact, Usage
from proxy.lifecycle_fields import LifecycleFields, read_lifecycle_fields
from proxy.tracked_batch import facts_of_prompt, fields_of_prompt


def test_choices_belong_to_the_prompt_they_are_numbered_after() -> None:
    choices = tuple(ChoiceFact(index=at, content=str(at)) for at in range(6))
    facts = AnswerFacts(status=200, choices=choices, usage=Usage(prompt_tokens=9), complete=True)
    parts = [facts_of_prompt(facts, place, 2) for place in range(3)]
    assert [[c.content for c in part.choices] for part in parts] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert [[c.index for c in part.choices] for part in parts] == [[0, 1]] * 3
    assert {part.usage for part in parts} == {Usage()}, "tokens are counted for all of them together"
    assert all(part.complete for part in parts)


def said(text: str) -> LifecycleFields:
    return read_lifecycle_fields([(b"x-kv-lifecycle", text.encode())])


def test_a_single_prompt_has_all_fields() -> None:
    fields = said('ctx="a", call="c", close, pin=("0:1"), source="s", seq=1')
    assert fields_of_prompt(fields, 0, 1) == fields


def test_operations_and_pins_count_once_and_a_named_context_ends_with_the_last() -> None:
    fields = said('ctx="a", call="c", close, pin=("0:1"), source="s", seq=1, agent="x"')
    first, middle, last = (fields_of_prompt(fields, place, 3) for place in range(3))
    assert [each.call for each in (first, middle, last)] == ["c", "c.1", "c.2"]
    assert [each.close for each in (first, middle, last)] == [False, False, True]
    assert [each.seq for each in (first, middle, last)] == [1, None, None]
    assert [len(each.pins) for each in (first, middle, last)] == [1, 0, 0]
    assert {(each.ctx, each.agent) for each in (first, middle, last)} == {("a", "x")}


def test_contexts_without_a_name_end_each_by_itself() -> None:
    assert all(fields_of_prompt(said("close"), place, 2).close for place in range(2))
