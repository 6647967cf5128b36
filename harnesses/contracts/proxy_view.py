"""What a proxy knows of contexts, for tests that run in a harness's environment: standard library only."""

import json
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 45.0


def contexts(name: str = "") -> dict[str, dict[str, Any]]:
    """Contexts by name, the latest of each; with `name` only that."""
    query = urllib.parse.urlencode({"ctx": name, "limit": 1000})
    rows = sorted(_get(f"/contexts?{query}")["items"], key=lambda row: row["active_ns"])
    return {row["context_id"]: row for row in rows}


def operations(name: str) -> list[dict[str, Any]]:
    """Operations that were applied to a context, in order, without numbers and names."""
    uid = contexts(name)[name]["uid"]
    events = [each["event"] for each in _get(f"/contexts/{uid}/events?limit=1000")["events"]]
    applied = [each["operation"] for each in events if each["type"].startswith("operation_applied")]
    return [{k: v for k, v in each.items() if k not in ("seq", "ctx")} for each in applied]


def parent(name: str) -> str:
    """Uid of the context that it works for, empty for none."""
    found: str = _get(f"/contexts/{contexts(name)[name]['uid']}")["parent_uid"]
    return found


def mismatches(name: str) -> int:
    """How often a list did not have the length that was declared."""
    uid = contexts(name)[name]["uid"]
    events = [each["event"] for each in _get(f"/contexts/{uid}/events?limit=1000")["events"]]
    return sum(each["type"].startswith("declaration_mismatched") for each in events)


def eventually(holds: Callable[[], Any]) -> Any:
    """What `holds` answers once it is true; raises `AssertionError` if that takes too long."""
    for _ in range(int(SECONDS / 0.05)):
        try:
            found = holds()
        except KeyError:
            found = None
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {SECONDS} s: {json.dumps(contexts(), indent=1)[:2000]}")


def run_page() -> dict[str, Any]:
    """Run the page's Python as one program, each line at its place in the page; answers its names."""
    page, kept, inside = os.environ["HARNESS_PAGE"], [], False
    for line in Path(page).read_text().splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        kept.append(line if inside and not fence else "")
    names: dict[str, Any] = {"__name__": "__page__"}
    exec(compile("\n".join(kept) + "\n", page, "exec"), names)
    return names


def _get(path: str) -> dict[str, Any]:
    url = f"{os.environ['KVTETHER_ADMIN_URL']}/kv/v1{path}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
