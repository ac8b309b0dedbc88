"""Objects of the cluster that events make and change."""

from __future__ import annotations

from typing import Any

from benchmarks.kubernetes.site import eventually

from .release import Site

OURS = {"key": "perdure.dev/uid", "operator": "Exists"}
"""Matches the pods of jobs."""


def thing(version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


async def has_condition(site: Site, machine: str, condition: str, wanted: str) -> bool:
    node = await site.api.get(f"/api/v1/nodes/{machine}")
    conditions = node["status"].get("conditions", []) if node else []
    return any(found["type"] == condition and found["status"] == wanted for found in conditions)


async def until_ready(site: Site, machine: str) -> None:
    """Waits until a machine is ready again.

    Raises:
        TrialFailed: if it is not in time.
    """
    await eventually(
        lambda: has_condition(site, machine, "Ready", "True"), seconds=120, otherwise=f"{machine} is not Ready again"
    )
