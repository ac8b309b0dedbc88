"""Reads policies that several systems of Kubernetes share: deadlines, retries, queues, clean-up."""

from __future__ import annotations

from .draft import Draft
from .reader import Field
from .world import BUDGET

STARTS = "a Perdure job starts when it is submitted; `perdure suspend NAME` holds it"


def put_seconds(draft: Draft, location: tuple[str, ...], field: Field, *, least: int = 0) -> None:
    """Writes a duration that the source gives as a number of seconds."""
    if (seconds := field.integer(least=least)) is not None:
        draft.put(location, f"{seconds}s", field)


def put_restarts(draft: Draft, field: Field) -> None:
    """Writes the number of restarts, with a warning about how they are counted."""
    if (count := field.integer()) is not None:
        draft.put(("retry", "max_restarts"), count, field)
        field.warn_changed(BUDGET)


def read_run_policy(policy: Field, draft: Draft) -> None:
    """Reads the RunPolicy of Kubeflow's training operator."""
    put_restarts(draft, policy["backoffLimit"])
    put_seconds(draft, ("limits", "active_deadline"), policy["activeDeadlineSeconds"], least=1)
    put_seconds(draft, ("ttl_after_finished",), policy["ttlSecondsAfterFinished"])
    policy["cleanPodPolicy"].drop("Perdure removes all nodes when the job ends, and keeps their logs")
    drop_suspend(policy["suspend"])
    policy["managedBy"].drop("Perdure's own workflows manage the job")
    scheduling = policy["schedulingPolicy"]
    draft.put(("queue",), scheduling["queue"].text(), scheduling["queue"])
    draft.put(("priority_class",), scheduling["priorityClass"].text(), scheduling["priorityClass"])
    scheduling["minAvailable"].drop("a job starts with roles.worker.nodes.min nodes")
    scheduling["minResources"].drop("a job starts with roles.worker.nodes.min nodes")
    put_seconds(draft, ("limits", "queue_timeout"), scheduling["scheduleTimeoutSeconds"], least=1)


def drop_suspend(suspend: Field) -> None:
    """Drops `suspend`; false is the default anyway."""
    if suspend.boolean():
        suspend.drop(STARTS)
    else:
        suspend.settle()
