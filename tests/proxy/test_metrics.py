"""Counts of what became true; no label takes a value that a client chooses."""

import re
from collections.abc import Set
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lifecycle.vocabulary import DirectiveOutcome, Mode
from proxy import problems
from proxy.limits import Limit
from proxy.metrics import MAX_TENANTS
from proxy.problems import OPENAI_TYPE_PREFIX
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.several_engines import several_engines
from tests.proxy.toy_model import CHUNK, NAME, ToyEngine
from tests.proxy.whole_proxy import Whole, lifecycle, user, whole_proxy

PROCESS = {
    "process_cpu_seconds",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}
NAMED = PROCESS | {
    "kvtether_config_reloads",
    "kvtether_config_refused",
    "kvtether_config_waiting",
    "kvtether_request_seconds",
    "kvtether_upstream_first_byte_seconds",
    "kvtether_upstream_failures",
    "kvtether_answers",
    "kvtether_control_seconds",
    "kvtether_control_failures",
    "kvtether_reclaimed_bytes",
    "kvtether_pins_leaked",
    "kvtether_log_waiting",
    "kvtether_log_lag_seconds",
    "kvtether_held_seconds",
    "kvtether_calls_in_flight",
    "kvtether_calls",
    "kvtether_mapping_waiting_characters",
    "kvtether_mappings",
    "kvtether_normalised",
    "kvtether_prefix_divergences",
    "kvtether_prefix_lost_tokens",
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
OF_SEVERAL = {
    "kvtether_backend_up",
    "kvtether_backend_draining",
    "kvtether_backend_calls_in_flight",
    "kvtether_backend_contexts",
    "kvtether_backend_calls",
    "kvtether_backend_unreached",
    "kvtether_backend_losses",
}
"""Those that there are with several engines only."""

CHOSEN = "Chosen"
"""Begins whatever the client of these tests chooses."""


async def scraped(it: Whole, named: Set[str] = NAMED) -> dict[str, float]:
    """Samples by name and labels. Every family is known."""
    text = (await it.admin.get("/metrics")).text
    told = list(text_string_to_metric_families(text))
    families = [f for f in told if not f.name.endswith("_created")]
    assert {f.name for f in families} == named
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
        tested = it.runtime.self_test
        token_bytes = tested.chunk_size * tested.bytes_per_token
        assert counted["kvtether_reclaimed_bytes_total{}"] == freed * token_bytes > 0
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
        outcomes = {str(o) for o in DirectiveOutcome}
        told = re.findall(r'kvtether_directives_total\{.*outcome="([^"]*)"', text)
        assert set(told) <= outcomes


async def series(it: Whole) -> set[str]:
    """Names and labels, without values."""
    text = (await it.admin.get("/metrics")).text
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


async def test_hostile_names_make_no_series_beyond_a_fixed_number(tmp_path: Path) -> None:
    """Models, paths, methods, agents, ids and keys that clients think of: the second dozen adds nothing."""

    async def script(exchange: Exchange) -> None:
        asked = exchange.header(b"x-answer")
        if asked:
            await exchange.read_body()
            await exchange.respond(int(asked[0]), b"{}", [(b"content-type", b"application/json")])
        else:
            await toy.script(exchange)

    toy = ToyEngine(FakeCache(chunk_size=CHUNK))
    async with whole_proxy(tmp_path, Mode.OBSERVE, script=script) as it:

        async def attack(numbers: range) -> None:
            for n in numbers:
                name = f"{CHOSEN}{n}"
                headers = {
                    "user-agent": name,
                    "x-request-id": name,
                    "traceparent": f"00-{n:032x}-{n:016x}-01",
                    "x-answer": str(200 + n * 17 % 380),
                    "x-litellm-session-id": name,
                    "authorization": f"Bearer {name}",
                    **lifecycle(ctx=name, agent=name, flow=name, parent=f"p{name}"),
                }
                body = {"model": name, "messages": [{"role": name, "content": name}]}
                for path in (
                    "/v1/chat/completions",
                    f"/{name}/x",
                    "/v1/responses",
                    "/v1/messages",
                    f"/kv/{name}",
                ):
                    await it.data.request("POST", path, json=body, headers=headers)
                await it.data.request(f"M{n}", f"/v1/{name}", headers=headers)
                await it.admin.get(f"/{name}")
                await it.runtime.mailboxes.settled()

        # What any client may bring about at all: every kind of status, outcome and API.
        every = range(24)
        await attack(every)
        for status in range(200, 600):
            await it.data.get("/x", headers={"x-answer": str(status)})
        before = await series(it)
        await attack(range(100, 112))
        assert await series(it) == before
        assert len(before) < 2_000
        assert not [line for line in before if CHOSEN in line]


async def test_only_so_many_tenants_get_series_of_their_own(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        metrics = it.runtime.metrics
        for n in range(3 * MAX_TENANTS):
            metrics.limited(f"tenant-{n}", Limit.CALLS)
        counted = {k: v for k, v in (await scraped(it)).items() if k.startswith("kvtether_limited_total{")}
        assert len(counted) == MAX_TENANTS + 1
        assert counted["kvtether_limited_total{limit=concurrent_calls,tenant=(others)}"] == 2 * MAX_TENANTS
        assert sum(counted.values()) == 3 * MAX_TENANTS


async def test_each_of_several_engines_has_metrics_of_its_own(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        place = await it.served([user("x")], lifecycle(ctx="a"))
        counted = await scraped(it, NAMED | OF_SEVERAL)
        assert {counted[f"kvtether_backend_up{{backend={name}}}"] for name in ("a", "b")} == {1}
        assert counted[f"kvtether_backend_calls_total{{backend={place}}}"] >= 1


def test_every_metric_that_the_pages_name_exists() -> None:
    repository = Path(__file__).resolve().parents[2]
    pages = [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]
    named = {name for page in pages for name in re.findall(r"\bkvtether_[a-z_]+", page.read_text())}
    metrics = {name.removesuffix("_total") for name in named if not name.endswith("_")}
    errors = {f"{OPENAI_TYPE_PREFIX}{kind}" for _, _, kind in problems._KINDS}
    sometimes = {"kvtether_read_models_lag_events", "kvtether_snapshot_age_seconds"}
    assert metrics - errors <= NAMED | OF_SEVERAL | sometimes
