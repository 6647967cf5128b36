"""Each error has one status and one name, in both shapes; nothing internal leaks."""

import json

import pytest

from engine_bridge.errors import CacheUnavailable
from lifecycle.errors import InvalidObservation, LogUnavailable, UnknownContext, VersionConflict
from proxy.errors import (
    BodyTooLarge,
    ConnectFailed,
    Draining,
    EngineFull,
    FirstByteTimeout,
    Forbidden,
    MethodRefused,
    NoSuchPath,
    TooManyCalls,
    Unauthenticated,
)
from proxy.problems import caller_error, openai_error, problem


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConnectFailed("x"), 502),
        (FirstByteTimeout("x"), 504),
        (Draining("x"), 503),
        (EngineFull("x"), 503),
        (TooManyCalls("x"), 429),
        (NoSuchPath("x"), 404),
        (MethodRefused("x"), 405),
        (BodyTooLarge("x"), 413),
        (Unauthenticated("x"), 401),
        (Forbidden("x"), 403),
        (UnknownContext("x"), 404),
        (InvalidObservation("x"), 422),
        (VersionConflict("s", 1, 2), 409),
        (LogUnavailable("x"), 503),
        (CacheUnavailable("x"), 503),
    ],
)
def test_both_shapes_agree(error: Exception, status: int) -> None:
    ours, rfc = openai_error(error), problem(error, "/kv/v1/x")
    shown = json.loads(ours.body)["error"]
    document = json.loads(rfc.body)
    assert ours.status == rfc.status == shown["code"] == document["status"] == status
    assert shown["message"] == document["detail"] == str(error)
    assert shown["type"] == "kvtether_" + document["type"].rpartition(":")[2]
    assert document["instance"] == "/kv/v1/x"
    assert (b"content-type", b"application/problem+json") in rfc.headers


def test_the_unexpected_keeps_its_text_to_itself() -> None:
    response = openai_error(KeyError("secret"))
    assert response.status == 500
    assert b"secret" not in response.body


def test_a_client_knows_when_to_come_back_and_how_to_authenticate() -> None:
    for error in (Draining("x"), EngineFull("x"), TooManyCalls("x")):
        for answer in (openai_error(error), caller_error(error, "/v1/messages")):
            assert dict(answer.headers)[b"retry-after"].isdigit()
    assert dict(problem(Unauthenticated("x")).headers)[b"www-authenticate"] == b"Bearer"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Unauthenticated("x"), 401, "authentication_error"),
        (TooManyCalls("x"), 429, "rate_limit_error"),
        (Draining("x"), 503, "overloaded_error"),
        (EngineFull("x"), 503, "overloaded_error"),
        (ConnectFailed("x"), 502, "api_error"),
    ],
)
def test_who_speaks_anthropics_api_is_answered_in_it(error: Exception, status: int, kind: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = caller_error(error, path)
        assert answer.status == status
        assert json.loads(answer.body) == {"type": "error", "error": {"type": kind, "message": "x"}}
    for path in ("/v1/chat/completions", "/v1/messagesx"):
        assert caller_error(error, path) == openai_error(error)
