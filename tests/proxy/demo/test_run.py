"""Both columns of a small demo: the same calls, and only one cache that is told what died."""

from proxy.demo.results import Outcome
from proxy.demo.run import COLUMNS, play
from tests.proxy.demo.small import NUM_CONCURRENT, backend, workload


async def test_only_the_cache_that_is_told_gets_rid_of_the_dead() -> None:
    made = workload()
    told: list[tuple[int, int]] = []

    def progress(outcome: Outcome, num_calls: int) -> None:
        told.append((len(outcome.calls) + outcome.num_failed, num_calls))

    stock, none = await play(COLUMNS[0], backend(), made, NUM_CONCURRENT, progress)
    ours, steps = await play(COLUMNS[1], backend(), made, NUM_CONCURRENT, progress)
    for outcome in (stock, ours):
        assert len(outcome.calls) == len(made.calls)
        assert outcome.num_failed == 0
    assert stock.prompt_tokens == ours.prompt_tokens
    assert stock.num_reclaimed_chunks == stock.num_bypassed_calls == 0
    assert ours.num_reclaimed_chunks > 0
    assert ours.num_bypassed_calls == sum(call.is_one_off for call in made.calls)
    assert stock.samples[-1].dead_tokens > 0
    assert ours.samples[-1].dead_tokens == 0
    assert told[-1] == (len(made.calls), len(made.calls))
    assert not none
    alive = [step.alive for step in steps]
    assert [step.dead for step in steps] == [0, 0, alive[0] - alive[2], 0, 0]
    assert [step.gone for step in steps] == [0, 0, 0, alive[0] - alive[2], alive[0] - alive[2]]
    assert alive[0] == alive[1] > alive[2] == alive[3] == alive[4] > 0
