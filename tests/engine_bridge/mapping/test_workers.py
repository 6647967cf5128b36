"""Whole renders elsewhere: same text, same errors, and a way out of endless ones."""

import asyncio

import pytest

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.template import RenderInput, compiled
from engine_bridge.mapping.workers import RenderWorkers
from tests.engine_bridge.mapping.conversations import CHATML

GIVEN = RenderInput(
    conversation=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
    owners=None,
    tools=None,
    kwargs={"add_generation_prompt": True},
)


@pytest.fixture
async def workers():
    workers = RenderWorkers()
    yield workers
    await workers.close()


async def test_a_worker_renders_what_we_would(workers):
    there, here = await workers.render(CHATML, GIVEN), compiled(CHATML).render_whole(GIVEN)
    assert (there.tail, there.segments, there.body_end) == (here.tail, here.segments, here.body_end)
    assert there.state == here.state


async def test_a_templates_refusal_comes_back_as_itself(workers):
    with pytest.raises(RejectedByEngine, match="not like this"):
        await workers.render("{{ raise_exception('not like this') }}", GIVEN)


async def test_a_state_that_cannot_travel_is_left_behind(workers):
    source = (
        "{% set ns = namespace(f=none) %}{% macro f() %}{% endmacro %}{% set ns.f = f %}"
        "{% for m in messages %}{{ m.content }}{{ ns.f() }}{% endfor %}"
    )
    rendering = await workers.render(source, GIVEN)
    assert rendering.tail == "hiyes"
    assert rendering.state is None


async def test_an_endless_render_is_given_up_and_the_next_one_works():
    workers = RenderWorkers(timeout_seconds=0.0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(Unmappable, match="longer than"):
        await workers.render(endless, GIVEN)
    await workers.close()
    patient = RenderWorkers()
    assert (await patient.render(CHATML, GIVEN)).tail
    await patient.close()


async def test_who_waits_for_a_process_is_not_given_up_with_the_endless_one_before():
    workers = RenderWorkers(timeout_seconds=2.0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    lost, found = await asyncio.gather(
        workers.render(endless, GIVEN), workers.render(CHATML, GIVEN), return_exceptions=True
    )
    assert isinstance(lost, Unmappable)
    assert found.tail == compiled(CHATML).render_whole(GIVEN).tail
    await workers.close()


async def test_nobody_waits_for_a_process_without_end():
    workers = RenderWorkers(patience_seconds=0.0)
    with pytest.raises(Unmappable, match="did not start"):
        await workers.render(CHATML, GIVEN)
    await workers.close()
    workers = RenderWorkers(timeout_seconds=3.0)
    await workers.render(CHATML, GIVEN)
    workers._patience = 0.1
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    results = await asyncio.gather(
        workers.render(endless, GIVEN), workers.render(CHATML, GIVEN), return_exceptions=True
    )
    assert ["longer than" in str(results[0]), "was free" in str(results[1])] == [True, True]
    await workers.close()
