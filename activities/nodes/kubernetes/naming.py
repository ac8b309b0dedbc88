"""Names and labels of a job's objects, by which each of them can be found."""

from __future__ import annotations

from workflows.names import fitting

LABEL = "perdure.dev/"
UID, ROLE, GROUP, RANK, INCARNATION, JOB = (
    f"{LABEL}{name}" for name in ("uid", "role", "group", "rank", "incarnation", "job")
)


def run_name(job_name: str, uid: str) -> str:
    """Returns the name of the objects that represent one run of a job. It is also a label value, so a long job name is
    shortened."""
    return fitting(f"perdure-{job_name}", f"-{uid}")
