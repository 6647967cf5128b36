"""Recordings of what harnesses send, with the truth of each request, for measuring how well it is inferred.

One file a run, one JSON object a request in the order of arrival:

    {"number", "at", "answered_at", "method", "path", "headers", "body", "answer", "kind", "ctx", "relation",
     "before"}

`headers` and `body` are as the harness sent them, but for the truth header. `answer` is the assistant's
message and `id` that it was answered with. `ctx` is the context that truly made it, `relation` one of
`harnesses.truth.Relation`, `before` the number of the request whose list it goes on with, null for none.
They stay on this machine: the texts in them are other people's.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec

from harnesses.model_server import TRUTH_HEADER
from harnesses.truth import TrueRequest


def write_recording(folder: Path, harness: str, requests: Sequence[TrueRequest]) -> Path:
    """Write a run below `folder/harness`, under the next free number; answers the file."""
    own = folder / harness
    own.mkdir(parents=True, exist_ok=True)
    path = next(each for n in count(1) if not (each := own / f"{n:04}.jsonl").exists())
    path.write_bytes(b"".join(msgspec.json.encode(line(each)) + b"\n" for each in requests))
    return path


def line(request: TrueRequest) -> dict[str, object]:
    """A request as it is recorded."""
    told = request.exchange.line()
    told["headers"] = [pair for pair in told["headers"] if pair[0] != TRUTH_HEADER]
    before = request.before.number if request.before is not None else None
    return {**told, "ctx": request.ctx, "relation": str(request.relation), "before": before}
