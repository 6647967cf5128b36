"""A harness before the proxy, as `make harnesses` runs each."""

import sys
from pathlib import Path

import httpx

from harnesses.conversation import CHAT
from harnesses.engine import MODEL_NAME
from harnesses.modules import AGENTS, Environment, HarnessModule, read_module
from harnesses.run import Outcome, drive, run_proxied, unfinished
from harnesses.table import HEADINGS, markdown, row
from harnesses.truth import Did, true_requests
from harnesses.world import proxied_model
from lifecycle.vocabulary import LIFECYCLE_HEADER, Tier
from tests.harnesses.talk import user

HERE = Environment(Path(sys.executable))


async def test_a_loop_without_any_integration_finishes_and_loses_nothing():
    outcome = await run_proxied(read_module(AGENTS / "openai_loop.py"), HERE)
    assert outcome.problem == "", outcome.output
    assert outcome.ok
    verdict = outcome.verdict
    assert verdict.requests > 10
    assert (verdict.unfollowed, verdict.unmapped, verdict.lost) == (0, 0, 0)
    assert verdict.contexts_right + verdict.contexts_wrong == 2
    assert verdict.edits_exact == 0
    assert verdict.edits_inferred + verdict.edits_missed == 1
    assert (verdict.one_offs, verdict.ends) == (1, 2)
    assert len(row(outcome)) == len(HEADINGS)


def test_a_task_is_done_if_its_driver_says_so_with_the_answer_of_the_task():
    assert unfinished([]) == unfinished([Did("context", {})]) == "it did not say that it was done"
    assert unfinished([Did("done", {"answer": "no"})]) == "its last answer is not the task's: 'no'"
    assert unfinished([Did("done", {"answer": "Finished tools."})]) == ""


async def test_a_harness_that_fails_is_no_success(tmp_path, model):
    path = tmp_path / "one.py"
    path.write_text("print('why it failed')\nraise SystemExit(3)")
    module = HarnessModule(name="one", path=path)
    problem, output = await drive(module, HERE, tmp_path, model.url, model.url, model)
    assert (problem, output.strip()) == ("it ended with 3", "why it failed")
    outcome = Outcome(module=module, problem=problem)
    assert not outcome.ok
    assert problem in markdown([row(outcome)])


async def test_kv_that_somebody_takes_from_a_living_context_is_found_to_be_lost(tmp_path):
    async with proxied_model(tmp_path) as world, httpx.AsyncClient(trust_env=False) as http:

        async def ask(words: str) -> None:
            body = {"model": MODEL_NAME, "messages": [user("[[task talk#t]] " + words)]}
            headers = {LIFECYCLE_HEADER: 'ctx="one"'}
            (await http.post(f"{world.up.data_url}{CHAT}", json=body, headers=headers)).raise_for_status()

        await ask("Word after word. " * 60)
        await world.settle()
        (first,) = true_requests(world.model.exchanges)
        gone = first.exchange.computed.prompt_keys[:2]
        world.model.engine.runner.delete("", gone, frozenset({Tier.L1, Tier.L2}))
        await ask("Word after word. " * 70)
        (_, second) = true_requests(world.model.exchanges)
        assert set(second.exchange.computed.missing) == set(gone)
