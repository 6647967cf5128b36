"""Schemathesis hook: a call that the engine would accept generates one token, so thousands take minutes."""

from typing import Any

import schemathesis

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LARGEST = 4


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if not isinstance(case.body, dict):
        return
    if "max_output_tokens" not in case.body and "input" in case.body:
        case.body["max_output_tokens"] = 1
    for name in LENGTHS:
        value = case.body.get(name, 2 if name == "max_tokens" else 0)
        if value is None or (isinstance(value, int) and value > 1):
            case.body[name] = 1
    for name in ("n", "best_of"):
        if isinstance(case.body.get(name), int):
            case.body[name] = min(case.body[name], LARGEST)
