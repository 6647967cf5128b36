"""Exchanges with the engine are timed and counted, and pass as they are."""

import pytest
from prometheus_client import CollectorRegistry

from proxy.errors import ConnectFailed, UpstreamBroken
from proxy.observed_upstream import ObservedUpstream
from proxy.request_metrics import RequestMetrics
from proxy.request_record import RequestRecord, run_for
from proxy.upstream import PooledUpstream, UpstreamRequest, UpstreamTarget
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream

REQUEST = UpstreamRequest(method="GET", raw_target=b"/x", headers=[(b"a", b"b")])


async def test_an_exchange_is_timed_and_passes() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(201, b"body", [(b"x-mine", b"1")])

    async with ScriptedUpstream(script) as engine:
        upstream = ObservedUpstream(
            PooledUpstream(UpstreamTarget.parse(engine.url)), RequestMetrics(CollectorRegistry())
        )
        record = RequestRecord("r")
        for each in (record, None):
            run_for(each)
            response = await upstream.open(REQUEST)
            assert response.status == 201
            assert (b"x-mine", b"1") in response.headers
            assert await response.read() == b"body"
            response.close()
        await upstream.close()
    assert record.began <= record.sent < record.first_byte
    assert record.engine_status == 201
    assert engine.exchanges[0].header(b"a") == [b"b"]
    assert not engine.exchanges[0].header(b"x-request-id")


async def test_how_it_failed_is_counted_by_kind() -> None:
    registry = CollectorRegistry()

    async def script(exchange: Exchange) -> None:
        exchange.writer.transport.abort()

    async with ScriptedUpstream(script) as engine:
        target = UpstreamTarget.parse(engine.url)
        upstream = ObservedUpstream(PooledUpstream(target), RequestMetrics(registry))
        with pytest.raises(UpstreamBroken):
            await upstream.open(REQUEST)
    with pytest.raises(ConnectFailed):
        await upstream.open(REQUEST)
    for kind in ("upstream_broken", "upstream_unreachable"):
        assert registry.get_sample_value("kvtether_upstream_failures_total", {"kind": kind}) == 1
