"""Writes the history into its database: each job in one transaction, by keys that make a repetition harmless.

SQLite waits for another writer for `_PATIENCE`; whatever the database does not do then, or while it is away, is raised
as `HistoryUnavailable`, and recorded later.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import ColumnElement, Connection, Engine, Table, create_engine, delete, event, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from perdure.activities.history.records import JobRecord, Row
from perdure.activities.history.schema import CURSORS, INCIDENTS, JOBS, OF_RUNS, PEAKS, ROLES, WORLDS
from perdure.base.errors import Refused

# It tells of each look at the tables.
logging.getLogger("alembic").setLevel(logging.WARNING)

_PATIENCE = 5.0
"""Seconds for a connection, and for another writer of a file."""

_POSTGRES: Final = {
    "connect_timeout": int(_PATIENCE),
    # A server that is cut off is noticed within half a minute; by default it would take hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""Options of PostgreSQL's client library."""
_LIMITS: Final = ("SET LOCAL lock_timeout = '5s'", "SET LOCAL statement_timeout = '60s'")
"""The same patience with others who have locked a table. They hold for a transaction, which poolers permit."""

_MIGRATIONS_LOCK = 7_337_110_031
"""PostgreSQL's advisory lock under which one process at a time changes the tables."""


class HistoryUnavailable(Exception):
    """The database is away, full, locked, or has tables of another release."""


class NotRecorded(Exception):
    """The database refuses the values of one job."""


class HistoryStore:
    """The history of one tenant in a database, which may hold that of others."""

    def __init__(self, url: str, *, tenant: str) -> None:
        """Creates the object; connects to nothing.

        Args:
            url: The database, as SQLAlchemy reads it.
            tenant: The namespace of Temporal whose jobs these are.

        Raises:
            Refused: if the address cannot be read, or its driver is missing.
        """
        self.tenant = tenant
        try:
            address = make_url(url)
            self._sqlite = address.get_backend_name() == "sqlite"
            if address.get_backend_name() not in ("sqlite", "postgresql"):
                raise Refused(f"the history can be kept in SQLite or PostgreSQL, not in {address.get_backend_name()}")
            patience = {"timeout": _PATIENCE} if self._sqlite else _POSTGRES
            self._engine: Engine = create_engine(address, pool_pre_ping=True, connect_args=patience)
        except (SQLAlchemyError, ImportError) as error:
            raise Refused(
                f"the address of the history's database cannot be used: {type(error).__name__}",
                remedy="See docs/history.md.",
            ) from error
        self._path = Path(address.database) if self._sqlite and address.database else None
        if self._sqlite:
            event.listen(self._engine, "connect", _begin_explicitly)
            event.listen(self._engine, "begin", _begin)
        else:
            event.listen(self._engine, "begin", _limit)

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        """Yields a connection whose changes all happen, or none.

        Raises:
            HistoryUnavailable: if the database does not answer, or cannot write.
            NotRecorded: if it refuses the values themselves.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except (DataError, IntegrityError) as error:
            raise NotRecorded(str(error.orig)) from error
        except DBAPIError as error:
            # The statement is left out: it holds what a job has said.
            raise HistoryUnavailable(f"{type(error.orig).__name__}: {error.orig}".strip()) from error

    def prepare(self) -> None:
        """Makes the tables, or changes those of an older release.

        Raises:
            HistoryUnavailable: if the tables are of a newer release, or the database is away.
        """
        if self._path is not None and not self._path.exists():
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._path.touch(mode=0o600)
            except OSError as error:
                raise HistoryUnavailable(f"{self._path} cannot be made: {error.strerror}") from error
        with self.transaction() as connection:
            if not self._sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATIONS_LOCK})
            config = _alembic(connection)
            if self._revision(connection, config) != ScriptDirectory.from_config(config).get_current_head():
                if not self._sqlite:
                    connection.execute(text("SET LOCAL statement_timeout = 0"))
                command.upgrade(config, "head")

    def check(self, connection: Connection) -> None:
        """Refuses tables of another release.

        Raises:
            HistoryUnavailable: if they are.
        """
        config = _alembic(connection)
        if self._revision(connection, config) != ScriptDirectory.from_config(config).get_current_head():
            raise HistoryUnavailable("its tables are not those of this release yet: a worker that records makes them")

    def _revision(self, connection: Connection, config: Config) -> str | None:
        revision = MigrationContext.configure(connection).get_current_revision()
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if revision is not None and revision not in known:
            raise HistoryUnavailable(f"its tables are of a newer release (revision {revision}): upgrade this worker")
        return revision

    def write(self, record: JobRecord) -> None:
        """Writes what is known of a job; what was written before is replaced, and nothing is written twice.

        Raises:
            HistoryUnavailable: as `transaction`.
            NotRecorded: as `transaction`.
        """
        key = {"tenant": self.tenant, "run": record.run}
        with self.transaction() as connection:
            self._upsert(connection, JOBS, [{**key, **record.job}])
            for table, rows in ((ROLES, record.roles), (WORLDS, record.worlds), (INCIDENTS, record.incidents)):
                self._upsert(connection, table, [{**key, **row} for row in rows])

    def _upsert(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        insert = sqlite.insert(table) if self._sqlite else postgresql.insert(table)
        keys = [column.name for column in table.primary_key]
        values = {name: self._newer(table, name, insert.excluded[name]) for name in rows[0] if name not in keys}
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=values), [dict(row) for row in rows])

    def _newer(self, table: Table, name: str, value: ColumnElement[Any]) -> ColumnElement[Any]:
        if table is not ROLES or name not in PEAKS:
            return value
        known, most = table.c[name], func.max if self._sqlite else func.greatest
        return most(func.coalesce(known, value), func.coalesce(value, known))

    def complete_until(self, task_queue: str) -> datetime | None:
        """The time until which all ends of jobs of a task queue are recorded; None before the first."""
        query = select(CURSORS.c.complete_until).where(
            CURSORS.c.tenant == self.tenant, CURSORS.c.task_queue == task_queue
        )
        with self.transaction() as connection:
            return connection.execute(query).scalar()

    def set_complete_until(self, task_queue: str, time: datetime) -> None:
        """Notes that all ends of jobs until then are recorded."""
        row: Row = {"tenant": self.tenant, "task_queue": task_queue, "complete_until": time}
        with self.transaction() as connection:
            self._upsert(connection, CURSORS, [row])

    def recorded(self, executions: Iterable[str]) -> set[str]:
        """Those of these runs whose end is recorded."""
        found: set[str] = set()
        ids = list(executions)
        with self.transaction() as connection:
            for start in range(0, len(ids), 500):
                query = select(JOBS.c.execution).where(
                    JOBS.c.tenant == self.tenant, JOBS.c.closed, JOBS.c.execution.in_(ids[start : start + 500])
                )
                found |= set(connection.execute(query).scalars())
        return found

    def forget_before(self, time: datetime) -> int:
        """Deletes the jobs that ended earlier; returns their number."""
        mine = JOBS.c.tenant == self.tenant
        old = select(JOBS.c.run).where(mine, JOBS.c.closed, JOBS.c.finished_at < time)
        with self.transaction() as connection:
            for table in OF_RUNS:
                connection.execute(delete(table).where(table.c.tenant == self.tenant, table.c.run.in_(old)))
            return connection.execute(delete(JOBS).where(mine, JOBS.c.closed, JOBS.c.finished_at < time)).rowcount


def _alembic(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", "perdure.activities.history:migrations")
    config.attributes["connection"] = connection
    return config


def _begin_explicitly(connection: Any, _: Any) -> None:
    # Python's driver would begin no transaction before a change of tables.
    connection.isolation_level = None


def _limit(connection: Connection) -> None:
    connection.exec_driver_sql("; ".join(_LIMITS))


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
