"""Runs cases one after the other and writes one JSON line for each: its verdict, and what the client saw.

Runs in the suites' environment, which knows nothing of this repository.
"""

import argparse
import asyncio
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

VOLATILE = frozenset(
    {
        "id",
        "_request_id",
        "call_id",
        "cached_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "cache_write_tokens",
        "completed_at",
        "created",
        "created_at",
        "item_id",
        "previous_response_id",
        "prompt_tokens_details",
        "request_id",
        "response_id",
        "system_fingerprint",
    }
)
"""Members whose value is another in every answer, or whether the cache was warm: only that they are there is
compared."""

ONE_ANSWER = (
    "date",
    "content-length",
    "x-request-id",
    "x-litellm-",
    "llm_provider-date",
    "llm_provider-content-length",
)
"""How headers begin whose value belongs to one answer: only that they are there is compared."""

Case = Callable[[], Awaitable[Mapping[str, Any]] | Mapping[str, Any]]
SECONDS = 60.0


def shape(value: Any) -> Any:
    """The value without what no two answers share."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", warnings=False)
    if isinstance(value, Mapping):
        return {
            key: type(each).__name__ if key in VOLATILE else shape(each)
            for key, each in sorted(value.items())
        }
    if isinstance(value, list | tuple):
        return [shape(each) for each in value]
    if isinstance(value, float):
        return round(value, 3)
    return value


def headers(found: Mapping[str, str]) -> dict[str, str]:
    """Each header as a part of its own, so that a difference names it."""
    lower = {key.lower(): value for key, value in found.items()}
    return {f"header {key}": "…" if key.startswith(ONE_ANSWER) else lower[key] for key in sorted(lower)}


def refusal(error: Exception) -> dict[str, Any]:
    """What a program can read from the error that its SDK raised."""
    response = getattr(error, "response", None)
    return {
        "exception": type(error).__name__,
        "status": getattr(error, "status_code", None),
        "body": shape(getattr(error, "body", None)),
        "content_type": None if response is None else response.headers.get("content-type"),
    }


async def _saw(case: Case) -> Mapping[str, Any]:
    if inspect.iscoroutinefunction(case):
        async with asyncio.timeout(SECONDS):
            return await case()
    return case()  # type: ignore[return-value]


def run(cases: Mapping[str, Case], refused: Mapping[str, Case]) -> None:
    """`cases` must succeed; `refused` must raise, and the exception is what was seen."""

    async def everything() -> None:
        for name, case in cases.items():
            try:
                _write(name, "passed", await _saw(case))
            except Exception as error:  # noqa: BLE001
                _write(name, "failed", {**refusal(error), "message": str(error)[:500]})
        for name, case in refused.items():
            try:
                _write(name, "failed", {"accepted": shape(await _saw(case))})
            except Exception as error:  # noqa: BLE001
                _write(name, "passed", refusal(error))

    asyncio.run(everything())


def _write(case: str, outcome: str, saw: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps({"case": case, "outcome": outcome, "saw": saw}, default=repr) + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    """`base_url` without `/v1`, and `model`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("model")
    return parser.parse_args()
