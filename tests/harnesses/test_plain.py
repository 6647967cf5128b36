from collections import Counter

import pytest

from harnesses.engine import MODEL_NAME
from harnesses.plain import BEHAVIOURS, behave
from harnesses.recording import line
from harnesses.truth import Relation, true_requests

DONE_BY = {
    "append": set(),
    "window": {Relation.EDIT},
    "summary": {Relation.ONE_OFF, Relation.COMPACTION},
    "prune": {Relation.EDIT},
    "retry": set(),
    "delegate": {Relation.SUBAGENT},
    "best-of": {Relation.FORK},
    "rewind": {Relation.EDIT},
    "clock": {Relation.EDIT},
}
"""What each behaviour does beside beginning and going on."""

ALWAYS = {Relation.NEW, Relation.APPEND, Relation.ONE_OFF}


def test_every_behaviour_is_described():
    assert set(DONE_BY) == set(BEHAVIOURS)


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_each_does_what_it_is_named_for_and_comes_to_an_end(name, model):
    await behave(name, 7, model.url, MODEL_NAME)
    requests = true_requests(model.exchanges)
    relations = Counter(each.relation for each in requests)
    assert relations.keys() - ALWAYS <= DONE_BY[name]
    assert DONE_BY[name] <= relations.keys()
    finals = {each.ctx for each in requests if each.exchange.answer.reply.kind == "final"}
    assert finals == {each.ctx for each in requests if not each.one_off}


async def test_chance_decides_by_the_seed_alone(model):
    for _ in range(2):
        await behave("append", 3, model.url, MODEL_NAME)
    sent = [(each.path, len(each.computed.prompt)) for each in model.exchanges]
    assert Counter(sent[: len(sent) // 2]) == Counter(sent[len(sent) // 2 :])


async def test_a_recording_tells_the_truth_beside_what_was_sent_and_not_in_it(model):
    await behave("best-of", 7, model.url, MODEL_NAME)
    lines = [line(each) for each in true_requests(model.exchanges)]
    assert all(name != "x-harness-truth" for each in lines for name, _ in each["headers"])
    forks = [each for each in lines if each["relation"] == "fork"]
    by_number = {each["number"]: each for each in lines}
    assert forks
    for each in forks:
        assert by_number[each["before"]]["ctx"] == each["ctx"].rpartition(".")[0]
