"""Where a worker keeps the history of jobs, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Self

from perdure.base.state_folder import StateFolder
from perdure.spec.durations import parse_duration

DATABASE_VARIABLE = "PERDURE_HISTORY"
"""The database: `off`, or an address as SQLAlchemy reads it, such as postgresql://user:password@host/perdure. Unset: a
file of the state folder, where the packages of the extra `history` are installed."""
RETENTION_VARIABLE = "PERDURE_HISTORY_RETENTION"
"""How long ended jobs are kept, such as 90d. Unset: 400 days."""

RETENTION = timedelta(days=400)
"""A year, and the time to compare it with the one before."""

_OFF = "off"


@dataclass(frozen=True, kw_only=True)
class HistorySettings:
    """The database and how long it keeps jobs."""

    url: str = field(repr=False)
    """It may hold a password."""
    retention: timedelta = RETENTION

    @classmethod
    def from_environment(cls, variables: Mapping[str, str], state: StateFolder) -> Self | None:
        """Returns the settings; None where no history is kept.

        Raises:
            ValueError: if a variable is not valid, or the packages for the database that it names are missing.
        """
        url = variables.get(DATABASE_VARIABLE, "").strip()
        if url == _OFF:
            return None
        installed = find_spec("sqlalchemy") is not None and find_spec("alembic") is not None
        if not installed:
            if url:
                raise ValueError(f"{DATABASE_VARIABLE} needs the packages of `pip install 'perdure[history]'`")
            return None
        if url and "://" not in url:
            raise ValueError(f"{DATABASE_VARIABLE}: expected off, or an address such as postgresql://user@host/perdure")
        scheme, separator, rest = url.partition("://")
        if scheme in ("postgresql", "postgres"):
            # SQLAlchemy would take another driver.
            url = f"postgresql+psycopg{separator}{rest}"
        given = variables.get(RETENTION_VARIABLE, "").strip()
        try:
            retention = parse_duration(given) if given else RETENTION
        except ValueError as error:
            raise ValueError(f"{RETENTION_VARIABLE}: {error}") from error
        return cls(url=url or f"sqlite:///{state.path / 'history.db'}", retention=retention)
