"""The tables of the history, as this release reads and writes them; `migrations` has the way there from older ones.

Each row is of one tenant, which is a namespace of Temporal, and of one run of a job. Keys are made of what is written,
so that writing the same twice changes nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    TypeDecorator,
)

from perdure.contract.base import LONGEST_TEXT


class Moment(TypeDecorator[datetime]):
    """A time in UTC. SQLite keeps no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


LONGEST_NAME = 400
"""Characters of names, among them those of images."""

_NAME = String(LONGEST_NAME)
_TEXT = String(LONGEST_TEXT)

METADATA = MetaData()


def _key(*names: str) -> list[Column[Any]]:
    """The tenant and the first run ID of the job, and what tells rows of one run apart."""
    kinds = {"role": _NAME, "generation": Integer, "number": Integer}
    return [
        Column("tenant", _NAME, primary_key=True),
        Column("run", String(64), primary_key=True),
        *(Column(name, kinds[name], primary_key=True, autoincrement=False) for name in names),
    ]


JOBS = Table(
    "jobs",
    METADATA,
    *_key(),
    Column("execution", String(64), nullable=False),
    Column("closed", Boolean, nullable=False),
    Column("namespace", _NAME, nullable=False),
    Column("name", _NAME, nullable=False),
    Column("uid", String(16), nullable=False),
    Column("backend", String(64), nullable=False),
    Column("owner", _NAME, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("phase", String(64), nullable=False),
    Column("reason", _TEXT, nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("finished_at", Moment),
    Column("worlds", Integer, nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("step", BigInteger),
    Index("jobs_by_name", "tenant", "namespace", "name"),
    Index("jobs_by_end", "tenant", "finished_at"),
)
ROLES = Table(
    "roles",
    METADATA,
    *_key("role"),
    Column("image", _NAME, nullable=False),
    Column("command", _NAME, nullable=False),
    Column("watched_seconds", Float),
    Column("memory_bytes", BigInteger),
    Column("cpu_cores", Float),
    Column("gpu_memory_bytes", BigInteger),
    Column("shm_bytes", BigInteger),
    Index("roles_by_image", "tenant", "image"),
    Index("roles_by_command", "tenant", "command"),
)
WORLDS = Table(
    "worlds",
    METADATA,
    *_key("role", "generation"),
    Column("nodes", Integer, nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("ended_at", Moment),
    Column("steps", BigInteger),
    Column("step_seconds", Float),
)
INCIDENTS = Table(
    "incidents",
    METADATA,
    *_key("number"),
    Column("role", _NAME, nullable=False),
    Column("title", _TEXT, nullable=False),
    Column("failure", String(64)),
    Column("host", _NAME, nullable=False),
    Column("node", Integer),
    Column("rule", _NAME, nullable=False),
    Column("action", _TEXT, nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("lost_seconds", Float),
    Index("incidents_by_host", "tenant", "host"),
)
CURSORS = Table(
    "cursors",
    METADATA,
    Column("tenant", _NAME, primary_key=True),
    Column("task_queue", _NAME, primary_key=True),
    Column("complete_until", Moment, nullable=False),
)
PEAKS = ("watched_seconds", "memory_bytes", "cpu_cores", "gpu_memory_bytes", "shm_bytes")
"""Columns of `ROLES` that only grow: each look at a job knows of other agents."""
OF_RUNS = (ROLES, WORLDS, INCIDENTS)
"""What belongs to a job, and is kept no longer than its row in `JOBS`."""
