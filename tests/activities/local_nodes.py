"""Runs real local nodes for tests, in a state folder of their own, and removes all of them afterwards."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure.activities.nodes.local import launch
from perdure.activities.nodes.local.folders import Ending, NodeFolder, now
from perdure.contract import NodeCredentials, NodeId, NodeRef, NodeRequest, WatchRequest
from perdure.contract.names import group_workflow_id, job_workflow_id, node_name, node_task_queue
from perdure.spec.job import JobSpec
from tests.support.waiting import eventually

NOWHERE = {"TEMPORAL_ADDRESS": "127.0.0.1:9"}
"""A port where no server is: agents wait."""


def run_at_once(*command: str) -> dict[str, Any]:
    """A role whose command starts without a world, as torchrun does."""
    return {"nodes": 1, "command": list(command), "rendezvous": "torchrun", "nproc_per_node": 1}


class LocalJob:
    """Requests for the nodes of one made-up job."""

    OUTPUT = "what people come back for"

    def __init__(self, state: Path, role: Mapping[str, Any] | None = None, **spec: Any) -> None:
        self.state = state
        self.uid = secrets.token_hex(4)
        self.spec = JobSpec.model_validate(
            {
                "name": "made-up",
                "namespace": f"tests-{self.uid}",
                "limits": {"termination_grace_period": "2s"},
                "timing": {"processes": {"stop_grace": "500ms"}},
                **spec,
                "roles": {"worker": role or run_at_once("sleep", "600")},
            }
        )
        self.job_id = job_workflow_id(self.spec.namespace, self.spec.name)
        self.group_id = group_workflow_id(self.job_id, self.uid, "worker", 0)
        self.job_first_run_id = "no-run"

    def request(self, rank: int = 0, incarnation: int = 1) -> NodeRequest:
        return NodeRequest(
            node=NodeCredentials(
                uid=self.uid, role="worker", rank=rank, incarnation=incarnation, token=secrets.token_hex(8)
            ),
            name=self.name(rank, incarnation),
            spec=self.spec,
            job_id=self.job_id,
            job_first_run_id=self.job_first_run_id,
            group_id=self.group_id,
            task_queue=node_task_queue(self.id(rank, incarnation)),
        )

    def id(self, rank: int = 0, incarnation: int = 1) -> NodeId:
        return NodeId(uid=self.uid, role="worker", rank=rank, incarnation=incarnation)

    def name(self, rank: int = 0, incarnation: int = 1) -> str:
        return node_name(self.spec.name, self.id(rank, incarnation))

    def ref(self, rank: int = 0, incarnation: int = 1, *, grace: float = 2.0) -> NodeRef:
        return NodeRef(
            name=self.name(rank, incarnation),
            uid=self.uid,
            role="worker",
            rank=rank,
            incarnation=incarnation,
            backend="local",
            namespace=self.spec.namespace,
            grace=timedelta(seconds=grace),
        )

    def watch(self, *, group: int = 0, owner_check: float = 1.0) -> WatchRequest:
        return WatchRequest(
            group_id=self.group_id,
            job_id=self.job_id,
            job_first_run_id=self.job_first_run_id,
            uid=self.uid,
            role="worker",
            group=group,
            backend="local",
            namespace=self.spec.namespace,
            owner_check=timedelta(seconds=owner_check),
        )

    def folder(self, rank: int = 0, incarnation: int = 1) -> Path:
        return self.state / "nodes" / self.name(rank, incarnation)

    def ended(self, *, ago: timedelta, rank: int = 0, incarnation: int = 1) -> NodeFolder:
        """A node as it lies there after its end."""
        folder = NodeFolder(self.folder(rank, incarnation))
        folder.make()
        launch.write_configurations(folder, self.request(rank, incarnation))
        folder.log.write_text(self.OUTPUT)
        folder.mark_ended(Ending(time=now() - ago, reason="deleted"))
        return folder

    def processes(self) -> dict[int, str]:
        """Everything of the job that runs, by PID, zombies aside."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            # Starters are on their way to becoming something, or nothing.
            if (
                command
                and "spawn.py" not in command
                and any(variable.startswith(f"PERDURE_NODE={self.uid}/".encode()) for variable in environment)
            ):
                found[int(entry.name)] = command
        return found

    def agent_state(self, rank: int = 0) -> dict[str, Any]:
        """Returns the saved state of the node's agent; empty if there is none yet."""
        path = self.folder(rank) / "run" / "agent-state.json"
        return json.loads(path.read_bytes()) if path.exists() else {}

    def pids(self, part: str) -> list[int]:
        return [pid for pid, command in self.processes().items() if part in command]


@asynccontextmanager
async def nothing_left(job: LocalJob) -> AsyncIterator[LocalJob]:
    """Ends, by PID, whatever of the job a test left."""
    try:
        yield job
    finally:

        def ended() -> bool:
            for pid in (left := job.processes()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        await eventually(ended, what=lambda: f"the end of {job.processes()}")
