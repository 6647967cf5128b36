"""Off by default, and then as if it did not exist; on without its libraries it says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from proxy.config import InvalidConfig, TracingConfig
from proxy.tracing import open_tracing
from tests.proxy.whole_proxy import user, whole_proxy

ROOT = Path(__file__).resolve().parents[2]
ODD = [
    ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("traceparent", "not  one"),
    ("tracestate", "a=1,b=2"),
    ("baggage", "k=v;p"),
]


def test_off_means_that_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, proxy.app; from proxy.config import Config; from proxy.tracing import open_tracing;"
        "assert open_tracing(Config().tracing) is None;"
        "print([m for m in sys.modules if m.startswith(('proxy.otel', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


async def test_off_passes_the_headers_of_traces_as_they_are(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.data.get("/v1/models", headers=ODD)
        body = {"model": "toy", "messages": [user("hi")]}
        await it.data.post("/v1/chat/completions", json=body, headers=ODD)
        for exchange in it.engine.exchanges[-2:]:
            sent = [(name.decode().lower(), value.decode()) for name, value in exchange.headers]
            assert [each for each in sent if each in ODD] == ODD
            assert len([name for name, _ in sent if name == "traceparent"]) == 2


def test_without_the_libraries_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    for name in [m for m in sys.modules if m == "proxy.otel_tracing" or m.startswith("opentelemetry.sdk.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InvalidConfig, match=r"kvtether\[tracing\]"):
        open_tracing(TracingConfig(endpoint="http://127.0.0.1:9"))
