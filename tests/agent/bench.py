"""A node with the receivers of its messages, for tests of its decisions."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perdure.agent.checks import Checker
from perdure.agent.config import AgentConfig
from perdure.agent.datasets import Datasets
from perdure.agent.node import Node
from perdure.agent.node_events import NodeEventEmitter
from perdure.agent.outbox import ControlPlaneBusy
from perdure.agent.stacks import StackReader
from perdure.agent.state import StateFile
from perdure.agent.store import StoreRelay
from perdure.contract import (
    AgentMessage,
    DatasetAnswer,
    DatasetRequest,
    NodeCredentials,
    NodeReached,
    Progress,
    StoreAnswers,
    StoreRequest,
)
from perdure_training.node_api.bodies import (
    CommandExit,
    EnteredReport,
    LauncherHello,
    RankExit,
)
from tests.support.desired import Desires, desired_world

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
IDENTITY = NodeCredentials(uid="0a1b2c3d", role="worker", rank=3, incarnation=2, token="secret")


class Received:
    """Records the messages that it receives."""

    def __init__(self) -> None:
        self.messages: list[AgentMessage] = []

    def put(self, message: AgentMessage, *, first: bool = False) -> None:
        self.messages.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


async def _no_exchange(name: str, request: DatasetRequest) -> DatasetAnswer:
    raise ControlPlaneBusy(f"{name} does not answer")


async def _no_call(request: StoreRequest) -> StoreAnswers:
    raise ControlPlaneBusy("the store does not answer")


class Bench:
    """A node and those it talks to."""

    def __init__(
        self,
        run_dir: Path,
        *,
        nodes: str = "2:4",
        mode: str = "torchrun",
        events: NodeEventEmitter | None = None,
        **config: Any,
    ) -> None:
        self.config = AgentConfig(
            node=IDENTITY,
            job_id="job/a/b",
            job_first_run_id="first",
            group_id="group",
            task_queue="queue",
            address="127.0.0.1",
            nodes=nodes,
            run_dir=run_dir,
            **config,
        )
        self.events = events
        self.progress = Progress(step=7)
        self.job, self.group = Received(), Received()
        self.desires = Desires(IDENTITY)
        self.node = self.start()
        self.node.on_launcher_hello(LauncherHello(pid=1, attempt=1, mode=mode, processes=1))
        self.store = StoreRelay(
            IDENTITY,
            send=_no_call,
            state=lambda: self.node.state,
            changed=self.node.changed,
            to_group=self.group.put,
        )
        self.datasets = Datasets(IDENTITY, send=_no_exchange, state=lambda: self.node.state, to_group=self.group.put)

    @property
    def of_ranks(self) -> dict[str, Any]:
        """What serves requests of ranks, as a server takes it."""
        return {
            "datasets": self.datasets,
            "store": self.store,
            "stacks": StackReader(self.node),
            "checks": Checker(self.node),
        }

    def start(self) -> Node:
        """An agent that has just started, perhaps again."""
        self.node = Node(
            self.config,
            StateFile(self.config.run_dir),
            to_job=self.job,
            to_group=self.group,
            progress=lambda: self.progress,
            events=self.events,
        )
        return self.node

    def desire(self, **desired: Any) -> NodeReached:
        """Has the group desire this, and all else as before."""
        return self.node.apply_desired(self.desires.next(**desired))

    def apply(self, generation: int, *, stage: int = 0, keeps_processes: bool = False) -> None:
        world = desired_world(
            IDENTITY,
            generation,
            nodes=2,
            processes=2,
            store_port=29500 + generation,
            stage=stage,
            keeps_processes=keeps_processes,
        )
        assert self.desire(world=world).accepted

    def enter(self, generation: int) -> None:
        self.node.on_entered(EnteredReport(generation=generation, time=NOW.timestamp()))

    def exit(self, *, attempt: int = 1, generation: int, code: int | None = None, **fields: Any) -> None:
        self.node.on_exited(
            CommandExit(attempt=attempt, generation=generation, exit_code=code, time=NOW.timestamp(), **fields)
        )


def rank(**fields: Any) -> RankExit:
    known: dict[str, Any] = {"local_rank": 0, "global_rank": 0, "pid": 10, "exit_code": 1, "time": NOW.timestamp()}
    return RankExit(**known | fields)
