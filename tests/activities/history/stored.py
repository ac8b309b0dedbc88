"""Jobs of the past for tests: what a played job answers, as the recorder reads it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import WorkflowExecutionStatus as WireStatus
from temporalio.api.workflow.v1 import WorkflowExecutionInfo

from perdure.activities.history.records import JobRecord, record_of
from perdure.base.executions import Execution
from perdure.contract import IncidentView, JobPhase, JobShape, JobStatus, Peaks, RoleShape

BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)

COMPLETED = WireStatus.WORKFLOW_EXECUTION_STATUS_COMPLETED
FAILED = WireStatus.WORKFLOW_EXECUTION_STATUS_FAILED
RUNNING = WireStatus.WORKFLOW_EXECUTION_STATUS_RUNNING


def status(**fields: Any) -> JobStatus:
    known: dict[str, Any] = {
        "name": "llama",
        "namespace": "nlp",
        "uid": "0",
        "phase": JobPhase.RUNNING,
        "role": "trainer",
        "backend": "kubernetes",
        "generation": 1,
        "nodes": 4,
        "nodes_min": 2,
        "nodes_max": 4,
        "world_size": 4,
        "restarts": 0,
        "max_restarts": 10,
        "restart_window": "1h",
        "started_at": BEGAN,
    }
    return JobStatus.model_validate(known | fields)


def incident(number: int, at: timedelta, *, lost: float = 30, **fields: Any) -> IncidentView:
    known: dict[str, Any] = {
        "number": number,
        "role": "trainer",
        "title": "rank 1 was killed",
        "failure": "KILLED",
        "host": "gpu-7",
        "culprit": 1,
        "started_at": BEGAN + at,
        "noticed_at": BEGAN + at,
        "stepping_at": BEGAN + at + timedelta(seconds=lost),
        "generation_before": number,
        "generation_after": number + 1,
        "nodes_before": 4,
        "nodes_after": 4,
    }
    return IncidentView.model_validate(known | fields)


def shape(image: str = "acme/llama:1", command: str = "torchrun train.py --lr", **labels: str) -> JobShape:
    return JobShape(roles=(RoleShape(role="trainer", image=image, command=command),), labels=labels)


def record(
    name: str = "llama",
    *,
    run: str = "",
    ended: WireStatus.ValueType = COMPLETED,
    took: timedelta = timedelta(hours=1),
    began: datetime = BEGAN,
    like: JobShape | None = None,
    answers: JobStatus | None = None,
    incidents: list[IncidentView] | None = None,
    live: dict[str, Peaks] | None = None,
) -> JobRecord:
    run = run or str(uuid4())
    close = Timestamp()
    close.FromDatetime(began + took)
    info = WorkflowExecutionInfo(
        execution=WorkflowExecution(workflow_id=f"job/nlp/{name}", run_id=run),
        status=ended,
        close_time=None if ended == RUNNING else close,
    )
    answers = answers or status(started_at=began)
    return record_of(Execution(info), run, began, like or shape(), answers, incidents or [], live)
