"""Counts of what became true; no label takes a value that a client chooses."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lifecycle.vocabulary import DirectiveOutcome, Mode
from proxy.limits import Limit
from proxy.metrics import MAX_TENANTS
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Whole, lifecycle, user, whole_proxy

NAMED = {
    "kvtether_held_seconds",
    "kvtether_calls_in_flight",
    "kvtether_calls",
    "kvtether_mappings",
    "kvtether_declaration_mismatches",
    "kvtether_directives",
    "kvtether_chunks_freed",
    "kvtether_chunks_confirmed",
    "kvtether_pins",
    "kvtether_pin_repairs",
    "kvtether_drift",
    "kvtether_cache_holds",
    "kvtether_foreign_pins",
    "kvtether_harm_budget_exceeded",
    "kvtether_regretted_tokens",
    "kvtether_untracked_calls",
    "kvtether_limited",
    "kvtether_tenant_calls_in_flight",
    "kvtether_tenant_contexts",
    "kvtether_tenant_pins",
    "kvtether_tenant_pinned_bytes",
    "kvtether_contexts",
    "kvtether_contexts_unmapped",
    "kvtether_contexts_gapped",
    "kvtether_pins_held",
    "kvtether_log_position",
    "kvtether_log_degraded",
    "kvtether_log_events",
    "kvtether_log_first_position",
    "kvtether_snapshot_lag_events",
    "kvtether_snapshot_bytes",
    "kvtether_snapshot_failures",
    "kvtether_chunks_live",
    "kvtether_chunks_dead",
}
CHOSEN = "Chosen"
"""Begins whatever the client of these tests chooses."""


async def scraped(it: Whole) -> dict[str, float]:
    """Samples by name and labels. Every family is known."""
    text = (await it.admin.get("/metrics")).text
    told = list(text_string_to_metric_families(text))
    families = [f for f in told if not f.name.endswith("_created")]
    assert {f.name for f in families} == NAMED
    assert all(f.documentation for f in families)
    samples = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


async def test_calls_directives_and_chunks_are_counted(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat([user("a message that is long enough for a chunk or two")], lifecycle(ctx="a"))
        index = it.runtime.tracker.contexts.index
        namespace = it.context("a").namespace
        await it.until(lambda: index.stats(namespace).verified > 0)
        counted = await scraped(it)
        assert counted["kvtether_calls_total{end=completed}"] == 1
        assert counted["kvtether_mappings_total{kind=exact}"] == 1
        assert counted["kvtether_contexts{}"] == 1
        assert counted["kvtether_chunks_live{}"] == index.stats(namespace).live > 0
        assert counted["kvtether_held_seconds_count{mode=enforce}"] == 1
        assert counted["kvtether_chunks_confirmed_total{stored=true}"] > 0
        await it.ops(
            {"op": "pin", "seq": 1, "ctx": "a", "span": [0, 1]},
            {"op": "unpin", "seq": 2, "ctx": "a", "span": [0, 1]},
            {"op": "close", "seq": 3, "ctx": "a"},
        )
        records = it.runtime.tracker.contexts.directives
        await it.until(lambda: len(records) >= 3 and all(r.result for r in records.values()))
        freed = sum(r.result.applied for r in records.values() if type(r.directive).__name__ == "Reclaim")  # type: ignore[union-attr]
        counted = await scraped(it)
        assert counted["kvtether_directives_total{kind=pin,outcome=applied}"] == 1
        assert counted["kvtether_chunks_freed_total{kind=reclaim}"] == freed > 0
        assert (counted["kvtether_pins_total{what=set}"], counted["kvtether_pins_total{what=released}"]) == (
            1,
            1,
        )
        assert (counted["kvtether_contexts{}"], counted["kvtether_pins_held{}"]) == (0, 0)
        assert counted["kvtether_calls_in_flight{}"] == 0


async def test_nothing_that_a_client_chooses_becomes_a_label(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE) as it:
        for n in range(5):
            name = f"{CHOSEN}{n}"
            await it.chat(
                [user(name)],
                lifecycle(ctx=name, call=name, agent=name, flow=name, tool=name, source=name, seq=1),
            )
            body = {"model": name, "messages": [{"role": name, "content": name}], "cache_salt": name}
            await it.data.post("/v1/chat/completions", json=body)
            await it.data.post(f"/v1/completions?{name}", json={"model": name})
            await it.ops({"op": "waiting", "seq": 1, "ctx": name, "kind": "tool", "tool": name}, source=name)
            await it.ops({"op": name, "seq": 1, "ctx": name}, source=name)
        before = len((await it.admin.get("/metrics")).text.splitlines())
        await it.chat([user("x")], lifecycle(ctx=f"{CHOSEN}x", agent=f"{CHOSEN}x"))
        text = (await it.admin.get("/metrics")).text
        assert CHOSEN not in text
        assert NAME not in re.findall(r'"([^"]*)"', text)
        assert len(text.splitlines()) == before
        outcomes = {f'outcome="{o}"' for o in DirectiveOutcome}
        assert all(o in outcomes for o in re.findall(r'outcome="[^"]*"', text))


async def test_only_so_many_tenants_get_series_of_their_own(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        metrics = it.runtime.metrics
        for n in range(3 * MAX_TENANTS):
            metrics.limited(f"tenant-{n}", Limit.CALLS)
        counted = {k: v for k, v in (await scraped(it)).items() if k.startswith("kvtether_limited_total{")}
        assert len(counted) == MAX_TENANTS + 1
        assert counted["kvtether_limited_total{limit=concurrent_calls,tenant=(others)}"] == 2 * MAX_TENANTS
        assert sum(counted.values()) == 3 * MAX_TENANTS
