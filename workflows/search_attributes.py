"""Search attributes by which jobs are found: a TrainingJob sets them, and clients query them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from perdure.contract import JobPhase
from perdure.spec.job import Backend

if TYPE_CHECKING:
    from perdure.workflows.policy.state.job import JobState

JOB_PHASE = SearchAttributeKey.for_keyword("JobPhase")
JOB_BACKEND = SearchAttributeKey.for_keyword("JobBackend")
JOB_NAMESPACE = SearchAttributeKey.for_keyword("JobNamespace")
JOB_OWNER = SearchAttributeKey.for_keyword("JobOwner")
WORLD_SIZE = SearchAttributeKey.for_int("WorldSize")
JOB_RESTARTS = SearchAttributeKey.for_int("JobRestarts")


def changed_attributes(
    state: JobState, phase: JobPhase, backend: Backend, *, shown: dict[str, str | int]
) -> list[SearchAttributeUpdate[Any]]:
    """The updates that a job has to make; the job keeps the new values as `shown`."""
    restarts = state.restart_count
    texts = {JOB_PHASE: phase.value, JOB_BACKEND: backend.value, JOB_NAMESPACE: state.namespace}
    numbers = {
        WORLD_SIZE: sum(role.world.processes for role in state.roles.values() if role.world),
        JOB_RESTARTS: restarts,
    }
    updates: list[SearchAttributeUpdate[Any]] = [
        *(key.value_set(value) for key, value in texts.items() if shown.get(key.name) != value),
        *(key.value_set(value) for key, value in numbers.items() if shown.get(key.name) != value),
    ]
    shown |= {key.name: value for key, value in (*texts.items(), *numbers.items())}
    return updates
