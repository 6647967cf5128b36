"""How requests went and how long each part of them took. Every label has a fixed set of values."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from proxy.request_record import RequestRecord

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

_APIS = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/generate": "generate",
    "/kv/v1/ops": "ops",
}
OTHER_API = "other"

_CODES = frozenset((200, 400, 401, 403, 404, 405, 408, 413, 422, 429, 500, 501, 502, 503, 504))


def api_of(path: str) -> str:
    """The label of a path: one of a few, whatever paths clients think of."""
    return _APIS.get(path, OTHER_API)


def code_of(status: int) -> str:
    """The label of a status: itself if it is a usual one, else its class; `none` for no answer."""
    if status in _CODES:
        return str(status)
    return f"{status // 100}xx" if 100 <= status < 600 else "none"


class RequestMetrics:
    """What the data listener did. With `kvtether_held_seconds` the time of a call falls into three: ours, the
    engine's until its first byte, and the whole."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Histogram(
            "kvtether_request_seconds",
            "Time from a request's head until its answer was over.",
            ["api", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_byte = Histogram(
            "kvtether_upstream_first_byte_seconds",
            "Time from a request's leaving for the engine until the engine's answer began.",
            ["api"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._answers = Counter(
            "kvtether_answers",
            "Requests by the status that they were answered.",
            ["api", "code"],
            registry=registry,
        )
        self._failures = Counter(
            "kvtether_upstream_failures",
            "Requests that the engine did not answer as HTTP demands.",
            ["kind"],
            registry=registry,
        )

    def answered(self, record: RequestRecord, seconds: float) -> None:
        """A request is over, after so many seconds."""
        api = api_of(record.path)
        self._total.labels(api, record.outcome).observe(seconds)
        self._answers.labels(api, code_of(record.status)).inc()
        if record.sent and record.first_byte:
            self._first_byte.labels(api).observe(record.first_byte - record.sent)

    def upstream_failed(self, kind: str) -> None:
        """The engine could not be reached, was silent, or broke off."""
        self._failures.labels(kind).inc()
