"""The wire form of every event type, pinned; `python -m tests.lifecycle.core.golden_events` rewrites it.

A line is an example: its type, its fields for people, its bytes. Lines of types that are no longer recorded
stay for ever: logs hold them.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.store.codec import encode
from tests.lifecycle.core.event_examples import EVENT_TYPES, full, least, tag

GOLDEN = Path(__file__).with_suffix(".jsonl")


def golden_lines() -> list[dict[str, Any]]:
    """What the file says."""
    return [json.loads(line) for line in GOLDEN.read_text().splitlines()] if GOLDEN.exists() else []


def current_lines() -> list[dict[str, Any]]:
    """What the code says: each type with all its fields, and with as few as it takes."""
    return [
        {
            "type": tag(event_type),
            "example": name,
            "event": json.loads(msgspec.json.encode(example)),
            "payload": encode(example).hex(),
        }
        for event_type in EVENT_TYPES
        for name, example in (("full", full(event_type)), ("least", least(event_type)))
    ]


def main() -> None:
    """Rewrite the file."""
    current = current_lines()
    tags = {line["type"] for line in current}
    kept = [line for line in golden_lines() if line["type"] not in tags]
    lines = sorted(kept + current, key=lambda line: (line["type"], line["example"]))
    GOLDEN.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
