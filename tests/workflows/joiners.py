"""Simulates machines started by a scheduler, for tests of workflows: they request slots, and are released."""

from __future__ import annotations

from typing import Any

from temporalio.client import WorkflowHandle

from perdure.contract import (
    JoinAnswer,
    JoinRequest,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeRequest,
    StopRequest,
)
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec
from tests.workflows.played_node import PlayedNode, now

Job = WorkflowHandle[Any, Any]

WAITING = "waiting for a user to run `perdure join`"


class JoiningNode(PlayedNode):
    """A machine that a scheduler started: it goes when its agent is told to, and reports it."""

    async def stop(self, request: StopRequest) -> None:
        await super().stop(request)
        gone = NodeEvent(
            kind=NodeEventKind.GONE, rank=self.rank, incarnation=self.incarnation, time=now(), reason=request.reason
        )
        group = self.fleet.client.get_workflow_handle(self.request.group_id)
        await group.signal("node_events", NodeEvents(events=(gone,)))


def joined_spec(nodes: str, **fields: Any) -> dict[str, Any]:
    return job_spec(nodes, backend="joined", limits={"termination_grace_period": "30s"}, **fields)


def asks(node_id: str, process: int = 1, **fields: Any) -> JoinRequest:
    session = f"session-of-{node_id}-{process}"
    return JoinRequest(node_id=node_id, session=session, started_at=now(), **{"host": node_id, **fields})


async def ask(job: Job, request: JoinRequest) -> JoinAnswer:
    return await job.execute_update("join", request, result_type=JoinAnswer)


async def join(fleet: Fleet, job: Job, request: JoinRequest) -> JoiningNode:
    """The machine with its agent running."""

    async def place() -> NodeRequest | None:
        return (await ask(job, request)).node

    played = JoiningNode(fleet, await eventually(place, what=f"a place for {request.node_id}"))
    fleet.started(played)
    await played.start()
    return played
