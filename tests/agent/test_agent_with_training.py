"""Tests of agents, launchers and the rendezvous handler together, under plain torchrun on two nodes; the workflows are
simulated."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.local.backend import LocalBackend
from perdure.contract import NodeCredentials, RankStarts
from perdure.contract.names import node_task_queue
from tests.activities.local_nodes import LocalJob, nothing_left
from tests.agent.harness import QUICK, Workflows, recording
from tests.agent.recorder import Call, Recorder
from tests.launcher.nodes import SCRIPTS
from tests.support.desired import Desires, desired_world
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

SCRIPT = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
from descent import Descent
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = Descent(model.parameters(), lr=0.01)
over = torch.zeros(1)
while not over.item():
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    over.fill_(float(Path("stop").exists()))
    dist.all_reduce(over)
    time.sleep(0.02)
dist.destroy_process_group()
"""


class Brain:
    """Takes the workflows' decisions on request of a test."""

    def __init__(self, workflows: Workflows, job: LocalJob, nodes: list[NodeCredentials]) -> None:
        self.workflows = workflows
        self.job = job
        self.nodes = nodes
        self._desires = {node.rank: Desires(node) for node in nodes}

    async def from_all(self, signal: str, generation: int = 0) -> list[dict[str, Any]]:
        """Such a message of each node."""
        field = "after_generation" if signal == "ready" else "generation"
        handle = self.workflows.job if signal == "finished" else self.workflows.group
        messages = {
            node.rank: (
                await self.workflows.expect(
                    handle,
                    signal,
                    within=120,
                    where=lambda body, node=node: body["sender"]["rank"] == node.rank and body[field] == generation,
                )
            )[0]
            for node in self.nodes
        }
        return [messages[node.rank] for node in self.nodes]

    async def desire(self, node: NodeCredentials, **desired: Any) -> None:
        command = self._desires[node.rank].next(**desired)
        call = Call(queue=node_task_queue(node), activity="apply_desired", argument=command.model_dump(mode="json"))
        answer = await self.workflows.group.execute_update(Recorder.call, call)  # pyrefly: ignore[no-matching-overload]
        assert answer["accepted"], answer

    async def form(self, generation: int, store_port: int) -> None:
        size = len(self.nodes)
        await asyncio.gather(
            *(
                self.desire(
                    node,
                    world=desired_world(
                        node,
                        generation,
                        nodes=size,
                        processes=size,
                        group_rank=index,
                        base_rank=index,
                        store_port=store_port,
                        store_host=index == 0,
                    ),
                )
                for index, node in enumerate(self.nodes)
            )
        )

    async def complete(self, generation: int) -> None:
        for node in self.nodes:
            await self.desire(node, complete_generation=generation)

    def rank_pid(self, rank: int) -> int:
        """The training process of a global rank."""
        for pid in self.job.pids("train.py"):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment and b"LOCAL_RANK=0" in environment:
                return pid
        raise AssertionError(f"rank {rank} does not run")


@pytest.mark.long("survival")
@pytest.mark.timeout(300)
async def test_training_goes_on_through_deaths(
    temporal_server: DevServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state, code = tmp_path_factory.mktemp("s"), tmp_path_factory.mktemp("code")
    (code / "train.py").write_text(SCRIPT)
    shutil.copy(SCRIPTS / "descent.py", code)
    role = {"nodes": 2, "command": ["torchrun", "train.py"], "nproc_per_node": 1}
    async with recording(temporal_server) as workflows:
        job = LocalJob(state, role, workdir={"path": str(code)}, timing=QUICK.model_dump(mode="json"))
        job.job_id, job.group_id = workflows.job.id, workflows.group.id
        job.job_first_run_id = workflows.job.first_execution_run_id or ""
        backend = LocalBackend(state, connection=temporal_server.environment)
        async with nothing_left(job):
            requests = [job.request(rank) for rank in range(2)]
            await asyncio.gather(*(backend.create(request) for request in requests))
            brain = Brain(workflows, job, [request.node for request in requests])
            ready = await brain.from_all("ready")
            ports = ready[0]["store_ports"]
            assert len(ports) > 1

            await brain.form(1, ports[0])
            await brain.from_all("stepping", 1)

            # A rank, and with it the agent that should report it.
            killed = time.time()
            [agent] = [pid for pid in job.pids("-m perdure.agent") if _node_of(pid) == 1]
            os.kill(agent, signal.SIGKILL)
            os.kill(brain.rank_pid(1), signal.SIGKILL)
            backend_keeper = asyncio.create_task(_restart_agents(backend, requests[1]))
            try:
                [failure, *_] = await workflows.expect(
                    workflows.job,
                    "failure",
                    within=60,
                    where=lambda body: body["sender"]["rank"] == 1 and body["ranks"][0]["signal"] == 9,
                )
            finally:
                backend_keeper.cancel()
            assert (failure["kind"], failure["generation"]) == ("RANKS", 1)
            print(f"failure of a rank whose agent died with it: told after {time.time() - killed:.2f} s")

            began = time.time()
            await brain.form(2, ports[1])
            stepping = await brain.from_all("stepping", 2)
            print(f"from the command to the first step of all: {time.time() - began:.2f} s")
            assert all(one["entered_at"] for one in stepping)
            starts = [RankStarts.model_validate(one["starts"]) for one in stepping]
            assert starts == [RankStarts(warm=1)] * len(stepping)

            # The end, with every rank in the exit barrier until all have finished.
            (code / "stop").touch()
            await brain.from_all("finished", 2)
            assert len(job.pids("torchrun")) >= 2
            await brain.complete(2)
            await eventually(lambda: not job.pids("torchrun"), within=60)
            await eventually(lambda: all(job.agent_state(rank)["exited_attempt"] == 1 for rank in range(2)))
            failures = await workflows.seen(workflows.job, "failure")
            assert all(one.body["generation"] == 1 for one in failures)
            await asyncio.gather(*(backend.delete(job.ref(rank)) for rank in range(2)))
            assert not job.processes()


def _node_of(pid: int) -> int:
    for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if variable.startswith(b"PERDURE_NODE="):
            return int(variable.split(b"/")[1].rpartition(b"-")[2])
    raise AssertionError(f"process {pid} belongs to no node")


async def _restart_agents(backend: LocalBackend, request: Any) -> None:
    """Restarts ended agents like a watch: creating a node again repairs it in the same way."""
    while True:
        await asyncio.sleep(0.3)
        await backend.create(request)


def test_the_interpreter_has_torchrun_beside_it() -> None:
    assert (Path(sys.executable).parent / "torchrun").exists()
