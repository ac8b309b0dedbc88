"""Makes rows of the history from what a job answers about itself.

Nothing that a job says is trusted: texts are cut and numbers bounded, so that no job can make a row that the database
refuses, or that spoils what is said about others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from perdure.activities.history.schema import LONGEST_NAME, PEAKS
from perdure.base.executions import Execution, ExecutionStatus
from perdure.contract import IncidentView, JobPhase, JobShape, JobStatus, Peaks
from perdure.contract.base import LONGEST_TEXT, shorten
from perdure.contract.names import job_of, uid_of
from perdure.contract.peaks import join_peaks
from perdure.workflows.search_attributes import JOB_BACKEND, JOB_OWNER

Row = dict[str, Any]

MOST_STEPS = 2**62
MOST_NUMBER = 2**31 - 1
LONGEST_TIME = timedelta(days=3650)
"""An interruption or a step cannot take longer, whatever a clock says."""

_PHASES_OF_ENDS = {
    ExecutionStatus.COMPLETED: JobPhase.SUCCEEDED,
    ExecutionStatus.CANCELED: JobPhase.CANCELLED,
    ExecutionStatus.TERMINATED: JobPhase.CANCELLED,
}


@dataclass(frozen=True)
class JobRecord:
    """The rows of one run of a job, without tenant and run, which the store adds."""

    run: str
    """The first run ID, the same for all runs of a workflow that continued as new."""
    job: Row
    roles: Sequence[Row] = ()
    worlds: Sequence[Row] = ()
    incidents: Sequence[Row] = ()


def record_of(
    execution: Execution,
    first_run: str,
    began: datetime,
    shape: JobShape,
    status: JobStatus | None,
    incidents: Sequence[IncidentView] = (),
    live: Mapping[str, Peaks] | None = None,
) -> JobRecord:
    """Makes the rows of a job.

    Args:
        execution: Its newest run, as the server lists it.
        first_run: The ID of its first run.
        began: When that began.
        shape: What its specification asks for.
        status: The job's own answer; None where it gives none, such as for a specification that was wrong.
        incidents: Its incidents.
        live: What the agents of its nodes report now, by role: the job itself learns of it rarely.
    """
    namespace, name = job_of(execution.id)
    finished = execution.close_time
    worlds = list(_worlds(status, incidents, finished)) if status is not None else []
    peaks = _peaks(status, live or {}) if status is not None else {}
    steps = [status.progress.step] if status is not None and status.progress is not None else []
    steps += [one.step_before for one in incidents if one.step_before is not None]
    return JobRecord(
        run=first_run,
        job={
            "execution": execution.run_id,
            "closed": finished is not None,
            "namespace": _name(namespace),
            "name": _name(name),
            "uid": uid_of(first_run),
            "backend": _name(execution.search_attributes.get(JOB_BACKEND) or "", 64),
            "owner": _name(execution.search_attributes.get(JOB_OWNER) or ""),
            "labels": {_name(key): _name(value) for key, value in shape.labels.items()},
            "phase": _phase(execution, status).value,
            "reason": _text(status.reason if status is not None else ""),
            "started_at": began,
            "finished_at": finished,
            "worlds": _number(status.generation) if status is not None else 0,
            "restarts": _number(status.restarts_total) if status is not None else 0,
            "step": min(max(steps), MOST_STEPS) if steps else None,
        },
        roles=[
            {
                "role": _name(role.role),
                "image": _name(role.image),
                "command": _name(role.command),
                **_use(peaks.get(role.role)),
            }
            for role in shape.roles
        ],
        worlds=worlds,
        incidents=[_incident(one) for one in incidents],
    )


def _peaks(status: JobStatus, live: Mapping[str, Peaks]) -> dict[str, Peaks | None]:
    known = {one.name: one.peaks for one in status.by_role} or {status.role: status.peaks}
    return {role: join_peaks((peaks, live.get(role))) for role, peaks in known.items()}


def _use(peaks: Peaks | None) -> Row:
    """What was recorded before stays where less is known now."""
    if peaks is None:
        return dict.fromkeys(PEAKS)
    return {
        "watched_seconds": peaks.watched,
        "memory_bytes": peaks.memory,
        "cpu_cores": peaks.cpu,
        "gpu_memory_bytes": peaks.gpu_memory,
        "shm_bytes": peaks.shm,
    }


def _phase(execution: Execution, status: JobStatus | None) -> JobPhase:
    if execution.is_open:
        return status.phase if status is not None else JobPhase.UNKNOWN
    return _PHASES_OF_ENDS.get(execution.status, JobPhase.FAILED)


def _incident(one: IncidentView) -> Row:
    lost = one.over_at - one.started_at if one.over_at is not None and one.observation is None else None
    return {
        "number": _number(one.number),
        "role": _name(one.role),
        "title": _text(one.title),
        "failure": one.failure.value if one.failure is not None else None,
        "host": _name(one.host),
        "node": _number(one.culprit) if one.culprit is not None else None,
        "rule": _name(one.rule),
        "action": _text(one.action),
        "started_at": one.started_at,
        "lost_seconds": _seconds(lost) if lost is not None else None,
    }


def _worlds(status: JobStatus, incidents: Sequence[IncidentView], finished: datetime | None) -> Iterable[Row]:
    """The worlds of all roles. Each begins and ends with an incident, and only the newest ones are still known."""
    newest = {one.name: (one.generation, one.nodes) for one in status.by_role}
    for role, (generation, nodes) in (newest or {status.role: (status.generation, status.nodes)}).items():
        own = [one for one in incidents if one.observation is None and one.role in ("", role)]
        starts = {one.generation_after: one for one in own if one.generation_after is not None}
        ends = {one.generation_before: one for one in reversed(own) if one.generation_after != one.generation_before}
        paces = {pace.generation: pace.step for pace in status.scaling.paces} if status.scaling is not None else {}
        for number in sorted({*starts, *ends, generation}):
            start, end = starts.get(number), ends.get(number)
            if number < 1 or (start is None and number > 1):
                continue
            began = (start.over_at or start.decided_at or start.started_at) if start is not None else status.started_at
            ended = end.started_at if end is not None else finished
            sized = (end.nodes_before if end is not None else 0) or (start.nodes_after if start is not None else 0)
            after = _last_step(status, end) if number == generation or end is not None else None
            first = (start.restored_step or 0) if start is not None else 0
            steps = min(max(after - first, 0), MOST_STEPS) if after is not None else None
            spent = _seconds(ended - began) if ended is not None else None
            usual = paces.get(number) or (spent / steps if spent and steps else None)
            yield {
                "role": _name(role),
                "generation": _number(number),
                "nodes": _number(sized or nodes),
                "started_at": began,
                "ended_at": max(ended, began) if ended is not None else None,
                "steps": steps,
                "step_seconds": _seconds(timedelta(seconds=min(usual, 1e9))) if usual is not None else None,
            }


def _last_step(status: JobStatus, end: IncidentView | None) -> int | None:
    if end is not None:
        return end.step_before
    return status.progress.step if status.progress is not None else None


def _text(text: str, limit: int = LONGEST_TEXT) -> str:
    """The text as every database takes it: PostgreSQL refuses NUL and half of a surrogate pair."""
    return shorten(text.replace("\0", "").encode("utf-8", "replace").decode(), limit)


def _name(text: str, limit: int = LONGEST_NAME) -> str:
    return _text(text, limit)


def _number(value: int) -> int:
    return min(max(value, 0), MOST_NUMBER)


def _seconds(duration: timedelta) -> float:
    return min(max(duration, timedelta()), LONGEST_TIME).total_seconds()
