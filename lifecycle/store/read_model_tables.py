"""Tables of the read models. `migrations/read_models` builds them; a test holds the two together.

Prefixed, so that they may share a database with others. Times are in UTC.
"""

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Index, Integer, MetaData, Table, Text

from lifecycle.projections.read_rows import CALLS, CONTEXTS, DIRECTIVES, PINS

metadata = MetaData()

VERSION_TABLE = "kv_read_models_schema"
"""Where alembic notes the revision: not beside the event log's."""


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _time(name: str, nullable: bool = True) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable)


def _count(name: str, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


status = Table(
    "kv_read_models",
    metadata,
    Column("name", Text, primary_key=True),
    _text("log_id"),
    _count("position"),
    _text("stale"),
    Column("rebuild", Boolean, nullable=False),
)
"""One row: how far the other tables tell of which log, and why not to trust them (`stale`, empty if one may).

`position` is written in the transaction that writes the rows. `rebuild` says that only a rebuild mends them.
"""

contexts = Table(
    CONTEXTS,
    metadata,
    Column("uid", Text, primary_key=True),
    _text("tenant"),
    _text("context_id"),
    _text("model"),
    _text("salt"),
    _text("agent"),
    _text("flow"),
    _text("parent_uid"),
    Column("forked", Boolean, nullable=False),
    Column("one_off", Boolean, nullable=False),
    _text("rung"),
    _text("state"),
    _count("messages"),
    _count("tokens", nullable=True),
    _text("unmapped"),
    _text("unverified"),
    _text("gap"),
    _text("wait"),
    _text("wait_tool"),
    _time("opened_at", nullable=False),
    _time("last_at", nullable=False),
    _time("closed_at"),
    _text("close_reason"),
    _count("position"),
    Index("kv_contexts_by_name", "tenant", "context_id"),
    Index("kv_contexts_by_time", "last_at"),
)
"""One row a context. `messages` and `tokens` are those of its last call; `unmapped` and `unverified` say why
that call's tokens are not known or not the cache's own, `gap` why the books may be wrong; empty if not so."""

calls = Table(
    CALLS,
    metadata,
    Column("uid", Text, primary_key=True),
    Column("call_id", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("streamed", Boolean, nullable=False),
    _count("choices"),
    _count("messages"),
    _time("arrived_at", nullable=False),
    _time("first_token_at"),
    _time("ended_at"),
    _text("outcome"),
    _text("finish_reason"),
    _count("prompt_tokens", nullable=True),
    _count("cached_tokens", nullable=True),
    _count("output_tokens", nullable=True),
    _text("mapping"),
    _text("mapping_reason"),
    _count("mapped_tokens", nullable=True),
    _count("position"),
    Index("kv_calls_by_time", "arrived_at"),
)
"""One row an attempt. `outcome` is empty while it is under way; token counts are the engine's own, NULL where
it did not say; `mapped_tokens` is what we counted."""

directives = Table(
    DIRECTIVES,
    metadata,
    Column("directive_id", Text, primary_key=True),
    _text("kind"),
    _text("model"),
    _text("salt"),
    _text("fingerprint"),
    _text("subject"),
    _text("reason"),
    _count("chunks"),
    _count("as_of"),
    _time("proposed_at", nullable=False),
    _text("outcome"),
    _text("outcome_reason"),
    Column("sent", Boolean),
    _count("applied"),
    _count("skipped"),
    _time("settled_at"),
    _count("position"),
    Index("kv_directives_by_time", "proposed_at"),
)
"""One row a directive. `sent` is NULL until it is known; `subject` names the call or the pin it was for."""

pins = Table(
    PINS,
    metadata,
    Column("pin_id", Text, primary_key=True),
    _text("uid"),
    _count("message"),
    _count("size_bytes"),
    Column("priority", BigInteger),
    _time("leased_at", nullable=False),
    _time("until_at", nullable=False),
    _time("released_at"),
    _text("release_reason"),
    _count("position"),
    Index("kv_pins_by_context", "uid"),
)
"""One row a pin; `released_at` is NULL while it is held. `message` is the index of the pinned message."""

ROWS = {table.name: table for table in (contexts, calls, directives, pins)}
"""The tables that events write, by name."""
