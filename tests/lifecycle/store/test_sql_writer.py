"""The blocking writer: one transaction a group, and none for a group in which nothing passes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, insert, select
from sqlalchemy.exc import IntegrityError

from lifecycle.core.events import ListGrown
from lifecycle.errors import LogUnavailable, VersionConflict
from lifecycle.store.database import blocking_engine, open_database
from lifecycle.store.sql_writer import Batch, SqlWriter
from lifecycle.store.tables import events as table


def batch(stream: str, expected_version: int, count: int = 1) -> Batch:
    return Batch(stream, [ListGrown(at_ns=1, num_new=n) for n in range(count)], expected_version)


@pytest.fixture
async def engine(tmp_path: Path) -> Engine:
    opened = await open_database(f"sqlite:///{tmp_path}/events.db")
    await opened.dispose()
    return blocking_engine(opened.url, busy_timeout_s=1.0)


@pytest.fixture
def commits(engine: Engine) -> list[str]:
    """The statements' first words, in order; the same one several times in a row once."""
    seen: list[str] = []

    def heard(statement: str) -> None:
        word = statement.split()[0]
        if seen[-1:] != [word]:
            seen.append(word)

    event.listen(engine, "connect", lambda connection, _: connection.set_trace_callback(heard))
    return seen


@pytest.fixture
def writer(engine: Engine) -> Iterator[SqlWriter]:
    writer = SqlWriter(engine)
    yield writer
    writer.close()


def test_a_group_shares_one_transaction(writer: SqlWriter, commits: list[str]) -> None:
    outcomes = writer.commit([batch(f"ctx/{n}", 0, count=3) for n in range(600)])
    positions = [r.position for outcome in outcomes for r in outcome]  # type: ignore[union-attr]
    assert positions == list(range(1, 1801))
    assert [s for s in commits if s != "WITH"] == ["BEGIN", "INSERT", "COMMIT"]


def test_a_group_without_a_winner_commits_nothing(writer: SqlWriter, commits: list[str]) -> None:
    (outcome,) = writer.commit([batch("ctx/a", 5)])
    assert isinstance(outcome, VersionConflict)
    assert "COMMIT" not in commits
    assert not isinstance(writer.commit([batch("ctx/a", 0)])[0], VersionConflict)


def test_each_batch_is_judged_after_the_one_before_it(writer: SqlWriter) -> None:
    outcomes = writer.commit(
        [batch("ctx/a", 0, 2), batch("ctx/a", 0), batch("ctx/a", 2, 3), batch("ctx/a", 2)]
    )
    first, second, third, fourth = outcomes
    assert [r.version for r in first] == [1, 2]  # type: ignore[union-attr]
    assert isinstance(second, VersionConflict)
    assert second.actual == 2
    assert [(r.version, r.position) for r in third] == [(3, 3), (4, 4), (5, 5)]  # type: ignore[union-attr]
    assert isinstance(fourth, VersionConflict)
    assert fourth.actual == 5


def test_the_table_itself_refuses_a_version_twice(writer: SqlWriter, engine: Engine) -> None:
    writer.commit([batch("ctx/a", 0)])
    with engine.connect() as connection:
        row = connection.execute(select(table)).one()._asdict() | {"position": 99}
        with pytest.raises(IntegrityError, match="version"):
            connection.execute(insert(table), [row])


def test_positions_are_not_given_out_twice_even_after_a_deletion(writer: SqlWriter, engine: Engine) -> None:
    writer.commit([batch("ctx/a", 0, 3)])
    with engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM events WHERE position > 1")
    (outcome,) = writer.commit([batch("ctx/b", 0)])
    assert [r.position for r in outcome] == [4]  # type: ignore[union-attr]


def test_a_failed_group_leaves_the_writer_usable(writer: SqlWriter, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER no BEFORE INSERT ON events WHEN new.stream = 'ctx/no' "
            "BEGIN SELECT raise(ABORT, 'not today'); END"
        )
    with pytest.raises(LogUnavailable, match="not today"):
        writer.commit([batch("ctx/a", 0), batch("ctx/no", 0)])
    (outcome,) = writer.commit([batch("ctx/a", 0)])
    assert [(r.version, r.position) for r in outcome] == [(1, 1)]  # type: ignore[union-attr]
