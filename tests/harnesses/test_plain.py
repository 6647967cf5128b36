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


async def test_each_does_what_it_is_named_for_and_comes_to_an_end(model):
    for name, done in DONE_BY.items():
        model.exchanges.clear()
        await behave(name, 7, model.url, MODEL_NAME)
        requests = true_requests(model.exchanges)
        relations = {each.relation for each in requests}
        assert relations - ALWAYS <= done, name
        assert done <= relations, name
        finals = {each.ctx for each in requests if each.exchange.answer.reply.kind == "final"}
        assert finals == {each.ctx for each in requests if not each.one_off}, name


async def test_chance_decides_by_the_seed_alone(model):
    def sent():
        requests = true_requests(model.exchanges)
        model.exchanges.clear()
        lengths = [(each.ctx, each.exchange.path, len(str(each.exchange.body))) for each in requests]
        return sorted(lengths)

    await behave("retry", 3, model.url, MODEL_NAME)
    first = sent()
    await behave("retry", 3, model.url, MODEL_NAME)
    assert sent() == first


async def test_a_recording_tells_the_truth_beside_what_was_sent_and_not_in_it(model):
    await behave("best-of", 7, model.url, MODEL_NAME)
    lines = [line(each) for each in true_requests(model.exchanges)]
    assert all(name != "x-harness-truth" for each in lines for name, _ in each["headers"])
    forks = [each for each in lines if each["relation"] == "fork"]
    by_number = {each["number"]: each for each in lines}
    assert forks
    for each in forks:
        assert by_number[each["before"]]["ctx"] == each["ctx"].rpartition(".")[0]
