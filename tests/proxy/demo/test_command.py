"""The whole demo, small: a table that can be read, a page that can be opened."""

import io
from pathlib import Path

from rich.console import Console

from proxy.demo.command import DemoPlan, demo, usual_plan
from tests.proxy.demo.small import CAPS, GAP_SECONDS, NUM_CONCURRENT, SEED, backend
from tests.proxy.demo.test_picture import read


async def test_a_small_demo_prints_its_table_and_writes_its_page(tmp_path: Path) -> None:
    html = tmp_path / "demo.html"
    plan = DemoPlan(
        backend=backend(),
        caps=CAPS,
        longest_gap_seconds=GAP_SECONDS,
        html=html,
        seed=SEED,
        num_concurrent=NUM_CONCURRENT,
    )
    out = io.StringIO()
    outcomes = await demo(Console(file=out, width=140), plan)
    said = out.getvalue()
    assert said.count("SIMULATED") >= 3
    assert str(html) in said
    text = read(html.read_text()).text
    for outcome in outcomes:
        assert outcome.title in said
        assert outcome.title in text
        assert f"{outcome.hit_share * 100:.1f} %" in said
        assert f"{outcome.hit_share * 100:.1f} %" in text
    assert f"kvtether demo --seed {SEED}" in text


def test_the_usual_plan_is_simulated_unless_real_engines_are_asked_for(tmp_path: Path) -> None:
    assert usual_plan(None, tmp_path / "a", 1, on_cpu=False).backend.simulated
    assert not usual_plan(None, tmp_path / "a", 1, on_cpu=True).backend.simulated
