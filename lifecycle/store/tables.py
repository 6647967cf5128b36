"""Tables of the embedded database. `migrations/` builds them; a test holds the two together."""

from sqlalchemy import Column, Integer, LargeBinary, MetaData, Table, Text, UniqueConstraint

metadata = MetaData()

events = Table(
    "events",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=True),
    Column("stream", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("type", Text, nullable=False),
    Column("at_ns", Integer, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("checksum", Integer, nullable=False),
    UniqueConstraint("stream", "version", name="uq_events_stream_version"),
    sqlite_autoincrement=True,
)
"""One row an event. `position` is never used twice; (`stream`, `version`) is the guard against two writers.

`type` and `at_ns` repeat what `payload` says, for people with an SQL prompt.
"""

settings = Table(
    "settings",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
"""Values that are made once and shared by every process on this database, such as the digest secret."""

held_pins = Table(
    "held_pins",
    metadata,
    Column("pin_id", Text, primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
)
"""Holds that a cache has for us, encrypted: what gives one back names its tokens, which are text."""

log_start = Table(
    "log_start",
    metadata,
    Column("trimmed_through", Integer, primary_key=True, autoincrement=False),
)
"""At most one row: the position of the last event that was trimmed."""

trimmed_streams = Table(
    "trimmed_streams",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("version", Integer, nullable=False),
)
"""Of each stream that lost events to a trim and goes on: the version of the last one that it lost."""

snapshots = Table(
    "snapshots",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("manifest", LargeBinary, nullable=False),
)
"""What was true at a position of the log; `manifest` names its parts."""

snapshot_parts = Table(
    "snapshot_parts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
"""Parts of snapshots. A name stands for one content for ever, so snapshots share parts."""
