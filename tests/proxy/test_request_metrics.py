"""Labels of requests are a few, whatever comes."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from proxy.request_metrics import RequestMetrics, api_of, code_of
from proxy.request_record import RequestRecord


@given(st.text(), st.integers())
def test_labels_are_a_few(path: str, status: int) -> None:
    assert api_of(path) == "other" or path.startswith(("/v1/", "/generate", "/kv/"))
    assert len(code_of(status)) in (3, 4)


def test_every_status_has_one_label_of_at_most_thirty() -> None:
    labels = {code_of(status) for status in range(-1, 1200)}
    assert len(labels) <= 30
    assert {"200", "429", "2xx", "5xx", "none"} <= labels


def test_an_answer_that_never_began_has_no_first_byte() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    record = RequestRecord("r", "POST", "/v1/completions")
    record.outcome = "failed"
    metrics.answered(record, 0.5)
    record.sent, record.first_byte, record.outcome, record.status = 1.0, 3.0, "completed", 200
    metrics.answered(record, 2.5)
    metrics.upstream_failed("upstream_broken")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvtether_{name}", labels)

    assert value("upstream_first_byte_seconds_count", api="completions") == 1
    assert value("upstream_first_byte_seconds_sum", api="completions") == 2.0
    assert value("request_seconds_sum", api="completions", outcome="failed") == 0.5
    assert value("answers_total", api="completions", code="none") == 1
    assert value("answers_total", api="completions", code="200") == 1
    assert value("upstream_failures_total", kind="upstream_broken") == 1
