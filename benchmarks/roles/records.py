"""What the benchmark of roles records, whatever the kind of the job."""

from __future__ import annotations

from pydantic import BaseModel

NOT_RUN = "not run"
ENDLESS = 1_000_000
"""Steps of a job that does not end by itself."""


class Case(BaseModel):
    """One part of a job that was killed."""

    backend: str
    kind: str
    role: str
    fault: str
    """`rank` or `node`."""
    recovered_s: float | None = None
    """Seconds from the kill until the part works again; None if it was not tried, or did not."""
    other_restarts: int | None = None
    lost: int | None = None
    doubled: int | None = None
    problem: str = ""
    """Why there is no figure."""


class Figures(BaseModel):
    """The last line of the benchmark."""

    cases: list[Case]
    rl_ettr: float | None = None
    """The share of its time in which the reinforcement learning was effective, at a fault each 20 seconds."""
    ps_worker_s: float | None = None
    ps_server_s: float | None = None
