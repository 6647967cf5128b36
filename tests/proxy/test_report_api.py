"""Spans and dimensions as people write them; what cannot be asked is refused with what can."""

from pathlib import Path

import pytest

from proxy.config import KeyConfig
from proxy.errors import InvalidRequest
from proxy.report_api import dimension, span_seconds
from tests.proxy.api_keys import sha
from tests.proxy.whole_proxy import whole_proxy


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("24h", 86_400), ("7d", 604_800)])
def test_spans(text: str, seconds: int) -> None:
    assert span_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0h", "1", "h", "-1h", "1.5h", "1w", "1h ", "9999999d"])
def test_no_spans(text: str) -> None:
    with pytest.raises(InvalidRequest, match="24h"):
        span_seconds(text)


def test_dimensions() -> None:
    assert dimension("agent") == "agent"
    with pytest.raises(InvalidRequest, match="harness"):
        dimension("mood")


async def test_what_cannot_be_asked_is_refused_and_so_is_who_must_not_ask(tmp_path: Path) -> None:
    keys = (
        KeyConfig(tenant="t", key_sha256=sha("caller")),
        KeyConfig(tenant="t", key_sha256=sha("op"), admin=True),
    )
    async with whole_proxy(tmp_path, api_keys=keys) as it:
        admin = {"authorization": "Bearer op"}
        for params in ({"since": "soon"}, {"by": "mood"}):
            answer = await it.admin.get("/kv/v1/report", params=params, headers=admin)
            assert answer.status_code == 400
            assert next(iter(params.values())) in answer.json()["detail"]
        for path in ("/kv/v1/report", "/kv/v1/report/dead"):
            assert (await it.admin.get(path)).status_code == 401
            asked = await it.admin.get(path, headers={"authorization": "Bearer caller"})
            assert asked.status_code == 403
            assert (await it.admin.get(path, headers=admin)).status_code == 200
