"""Changes the specification of a job that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .job import JobSpec
from .roles import NodeCount
from .scaling import Scaling
from .validate import to_mapping


def with_scaling(
    job: JobSpec, role: str, scaling: Mapping[str, Any], *, nodes: NodeCount | None = None
) -> dict[str, Any]:
    """Returns the specification as plain data with another `scaling` of a role.

    Args:
        job: The specification.
        role: The role.
        scaling: Its whole `scaling`, unchecked.
        nodes: Its number of nodes, where that is another one than the specification's.
    """
    spec = to_mapping(job)
    changed = {**spec["roles"][role], "scaling": dict(scaling)}
    if nodes is not None:
        changed["nodes"] = {"min": nodes.min, "max": nodes.max, "unit": nodes.unit}
    return {**spec, "roles": {**spec["roles"], role: changed}}


def scaling_mapping(scaling: Scaling) -> dict[str, Any]:
    """Returns `scaling` as plain data without defaults, as a specification has it."""
    return scaling.model_dump(mode="json", exclude_defaults=True)
