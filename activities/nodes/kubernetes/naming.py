"""What a job's objects are called, and how they are labelled, so that each is found by what it stands for."""

from __future__ import annotations

from workflows.names import fitting

LABEL = "perdure.dev/"
UID, ROLE, GROUP, RANK, INCARNATION, JOB = (
    f"{LABEL}{name}" for name in ("uid", "role", "group", "rank", "incarnation", "job")
)


def run_name(job_name: str, uid: str) -> str:
    """Of the objects that stand for one run of a job; a label's value too, so a long job's name is shortened."""
    return fitting(f"perdure-{job_name}", f"-{uid}")
