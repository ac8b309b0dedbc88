"""Names and labels of a job's objects, by which each of them can be found."""

from __future__ import annotations

from collections.abc import Mapping

from workflows.names import fitting

OURS = {"app.kubernetes.io/managed-by": "perdure"}
"""Labels of every object that the worker makes."""

LABEL = "perdure.dev/"
UID, ROLE, GROUP, RANK, INCARNATION, JOB = (
    f"{LABEL}{name}" for name in ("uid", "role", "group", "rank", "incarnation", "job")
)


def selector(labels: Mapping[str, str]) -> str:
    """A label selector for objects that have all of these."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


def run_name(job_name: str, uid: str) -> str:
    """Returns the name of the objects that represent one run of a job. It is also a label value, so a long job name is
    shortened."""
    return fitting(f"perdure-{job_name}", f"-{uid}")
