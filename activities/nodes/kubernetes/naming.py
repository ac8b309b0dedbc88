"""Names and labels of a job's objects, by which each of them can be found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS = {"app.kubernetes.io/managed-by": "perdure"}
"""Labels of every object that the worker makes."""

LABEL = "perdure.dev/"
UID, ROLE, GROUP, RANK, INCARNATION, JOB = (
    f"{LABEL}{name}" for name in ("uid", "role", "group", "rank", "incarnation", "job")
)

LEAVING = f"{LABEL}leaving"
"""The label of a pod that the worker deletes: no other pod of the job is placed near it any more."""
NAMED = f"{LABEL}named"
"""The label of a pod that has its node's name in the Service of its job, until the worker deletes it."""


def selector(labels: Mapping[str, str]) -> str:
    """A label selector for objects that have all of these."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


def is_ours(found: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> bool:
    """Returns whether the worker made an object, with these labels among others.

    Requests name objects, and a request may be forged: what the worker did not make it neither changes nor deletes.
    """
    there: Mapping[str, str] = found["metadata"].get("labels") or {}
    return (OURS | dict(labels or {})).items() <= there.items()
