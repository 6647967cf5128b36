"""A snapshot of each format, kept for ever; `python -m tests.lifecycle.golden_snapshots` adds a new one's.

It is never rewritten: trimmed logs have nothing but snapshots like it.
"""

import asyncio
from pathlib import Path

import msgspec

from lifecycle.core.digest import digest_all
from lifecycle.ports import StoredSnapshot
from lifecycle.projections.contexts import Contexts
from lifecycle.snapshots import FORMAT, read_manifest
from tests.lifecycle.random_books import busy, lived


class Golden(msgspec.Struct):
    """A stored snapshot, its parts, and what is in it."""

    snapshot: StoredSnapshot
    parts: dict[str, bytes]
    contains: bytes


def golden_files() -> list[Path]:
    """One a format."""
    return sorted(Path(__file__).parent.glob("golden_snapshot_*.msgpack"))


def read_golden(path: Path) -> Golden:
    """One of them."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Golden)


def contents(contexts: Contexts) -> bytes:
    """Digest of what a snapshot must give back."""
    return digest_all(
        (contexts.position, contexts.states, contexts.directives, contexts.held(), contexts.index.digest())
    )


async def current() -> Golden:
    """The snapshot that the code writes."""
    steps = [step for step in busy(3, 200) if step not in ("wait", "trim", "later")]
    it, snapshots = await lived(3, (*steps, "pin", "arrive", "snapshot"))
    (newest, *_) = await snapshots.newest_first()
    parts = dict(await snapshots.parts(list(read_manifest(newest).parts())))
    return Golden(newest, parts, contents(it.tracker.contexts))


def main() -> None:
    """Add the file of the current format."""
    path = Path(__file__).with_name(f"golden_snapshot_{FORMAT}.msgpack")
    if not path.exists():
        path.write_bytes(msgspec.msgpack.encode(asyncio.run(current())))


if __name__ == "__main__":
    main()
