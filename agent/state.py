"""The agent's persistent state, which lets it be killed and restarted beside running training."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from perdure.agent.files import KeptFile
from perdure.agent.notifier import Notifier
from perdure.contract.agents import SnapshotUse
from perdure.contract.checkpoints import CheckpointRef, Commit, HoldRequest
from perdure.contract.commands import CopyTarget, NodeReached
from perdure.contract.logs import LogPosition
from perdure.contract.peaks import Peaks
from perdure.contract.worlds import RoleAddresses
from perdure_training.node_api.bodies import CheckRequest, Desired, World, WorldAnswer
from perdure_training.node_api.layout import AGENT_STATE

logger = logging.getLogger(__name__)


class AgentState(BaseModel):
    """The persistent state of one incarnation."""

    version: int = 0
    """The version of the launcher's desired state; it changes whenever that state does."""
    desired_version: int = 0
    """The version of the newest desired state that the group has sent."""
    run: bool = True
    """Whether the command should run."""
    attempt: int = 1
    """The desired start of the command; the first one needs no request."""
    started_for: int = 0
    """The newest generation that was known when that start was requested."""
    exited_attempt: int = 0
    """The newest start whose end was reported."""
    exited: str = ""
    """The identity of that report: a launcher that received no answer repeats it."""
    mode: str = ""
    """The launcher's mode, `torchrun` or `env`; empty before the launcher reported it."""
    script: bool = False
    """Whether the command may do other work before it starts torchrun, as reported by the launcher."""
    rendezvous_attempt: int = 0
    """The start of the command whose torchrun has sent its greeting and has ranks to run."""
    processes: int | None = None
    """The number of the node's ranks; None before the launcher or the handler reported it."""
    command_nodes: str | None = None
    """The command's own `--nnodes`, if it differs from the specification."""
    handler: int | None = None
    """The PID of the handler that sent the latest greeting."""
    left: int = 0
    """The newest generation of an ended handler: it and older ones are not handed out again."""
    store_ports: tuple[int, ...] = ()
    """Ports on which the handler already listens."""
    ready_after: int | None = None
    """The generation after which the node waits for a world; None while it does not wait."""
    world: World | None = None
    """The newest world that this node has received."""
    continued_since: int = 0
    """The oldest generation whose processes continue in that world, where it keeps processes."""
    distrusted_checkpoints: tuple[CheckpointRef, ...] = ()
    """Those in the job's storage that its ranks do not load."""
    stacks_requested: int = 0
    """Counts the requests for the ranks' stacks."""
    stacks_by_signal: bool = True
    """The newest request is for the ranks' own answers, and not only for what the kernel says of them."""
    check_runs: int = 1
    """The number of runs of the checks of its machine that the node is to make before it is taken into a world."""
    checked: int = 0
    """The last one that it has reported."""
    checks: CheckRequest | None = None
    """The newest request to measure the machine."""
    complete: int = 0
    """The newest generation that every rank of the job finished."""
    stages_complete: int = 0
    """The number of the command's torchruns that the job has finished."""
    command_restarts: int = 0
    """The number of times that the command was to be started again between two worlds."""
    checkpoint_request: int = 0
    """The newest request for a checkpoint of which the ranks are to make one."""
    hold: HoldRequest | None = None
    """The request to have the ranks of the world wait at a step; None where they need not."""
    commit: Commit | None = None
    """The checkpoint that this node is to commit."""
    committed: Commit | None = None
    """The one that it has committed last."""
    copies: CopyTarget | None = None
    """The node that keeps the copies of what its script saves."""
    roles: dict[str, RoleAddresses] = {}
    """All roles of the job, where it has several."""
    superseded: int = 0
    """The newest generation in whose exit barrier torchrun requested a restart of the command."""
    entered: int = 0
    """The generation that the node's processes are in."""
    entered_at: datetime | None = None
    entered_base_rank: int | None = None
    """The global rank of the node's first rank in that generation; None where it is not known."""
    first_step: timedelta | None = None
    """The time that the ranks have for their first step in the newest world; None for no limit."""
    measurements: int = 0
    """The measurements of steps that are to be reported in the newest world, changed or not."""
    pace_over: timedelta | None = None
    """The time of steps over which the speed of the newest world is measured; None where it is not."""
    output_since: LogPosition | None = None
    """The end of the log when the ranks of the last world had ended."""
    stepping: int = 0
    """The newest generation that was reported to run or to step."""
    stepped: int = 0
    """The newest generation in which steps were detected and reported."""
    saving: int = 0
    """The newest generation in which a rank began to save into the job's storage."""
    snapshots: SnapshotUse | None = None
    """How its ranks keep their state in memory, as far as they have said it."""
    snapshots_in: int = 0
    """The newest generation in which they have."""
    stalled: int = 0
    """The generation that was reported as stalled; 0 once it was reported to step again."""
    pauses: tuple[float, ...] = ()
    """Seconds of the newest pauses between steps that ended by themselves."""
    peaks: Peaks | None = None
    """The most that the node has used of its machine."""
    finished: int = 0
    """The newest generation that was reported as finished on this node."""
    failures: list[str] = []
    """Identities of reported failures: a client that received no answer repeats its report."""
    ended_by: str = ""
    """The party that ends the node from outside; empty if none. From then on the end of its processes is no news about
    the training."""
    departs: bool = False
    """That party has started the node, and reports its end itself."""
    released: bool = False
    """A node that is ended from outside need not wait for a checkpoint any longer."""
    waits: str = ""
    """What its command waits for before it starts; empty if it does not."""
    leaving: str | None = None
    """Why the command must end for good; None while it may run."""
    leaving_grace: float = 0.0
    """Seconds that the command then has, from SIGTERM to SIGKILL."""

    @property
    def generation(self) -> int:
        """The newest generation that this node has received; older ones are refused."""
        return self.world.generation if self.world else 0

    @property
    def is_ended(self) -> bool:
        """Whether the end of the command was requested: by the job, from outside, or by the process that started the
        node. A script may exit with 0 on the signal, and that completes nothing. That the command is not known to run
        is no request: an agent that has lost its state knows of none, and its ranks may finish."""
        return bool(self.ended_by) or self.departs or self.leaving is not None

    @property
    def prepares(self) -> bool:
        """Whether the command does other work before its next torchrun: a download, an installation."""
        runs = self.run and self.exited_attempt < self.attempt and self.leaving is None
        return runs and self.script and not self.waits and self.rendezvous_attempt < self.attempt

    @property
    def summary(self) -> str:
        """A short description, for users."""
        if self.leaving is not None:
            return "leaving"
        if self.exited_attempt >= self.attempt:
            return "command ended"
        if self.waits:
            return self.waits
        if self.prepares:
            return "its command has not reached its torchrun"
        if self.ready_after is not None:
            return "waiting for a world"
        if self.entered and self.entered in (self.finished, self.complete):
            return "its command runs without ranks"
        if self.entered and self.entered == self.stepping >= self.generation:
            return "stepping" if self.stepped == self.stepping else "running"
        return "starting"

    def reached(self, *, refusal: str) -> NodeReached:
        """What the node has reached of what its group desires, with the reason if it does not follow."""
        return NodeReached(
            accepted=not refusal,
            version=self.desired_version,
            generation=self.generation,
            entered=self.entered,
            preparing=self.prepares,
            committed=self.committed.checkpoint if self.committed is not None else None,
            detail=refusal or self.summary,
        )

    @property
    def trains(self) -> bool:
        """Whether the processes are alive in the newest world and have stepped there, so that they should continue to
        step."""
        return self.has_ranks and self.entered == self.stepping == self.generation

    @property
    def starts(self) -> bool:
        """Whether the processes are in the newest world and have not all stepped there."""
        return self.has_ranks and self.stepped < self.entered == self.generation

    @property
    def has_ranks(self) -> bool:
        """Whether ranks train in the world that the node entered last, as far as is known."""
        ended = self.exited_attempt >= self.attempt or self.ready_after is not None or not self.run
        return not ended and self.finished < self.entered

    @property
    def desired(self) -> Desired:
        """The desired state of the launcher."""
        return Desired(
            version=self.version,
            run=self.run,
            attempt=self.attempt,
            stop_generation=0 if self.world is None or self.world.keeps_processes else self.generation - 1,
            world=self._open_world,
            exit=self.leaving is not None or self.released,
            exit_grace_s=self.leaving_grace if self.leaving is not None else None,
            reason=self.leaving or "",
            stacks=self.stacks_requested,
            stacks_by_signal=self.stacks_by_signal,
            checks=self.checks,
        )

    def present_generation(self, started_in: int) -> int | None:
        """The generation that a process of this node belongs to now; None if its own is over.

        A process that continues in a newer world knows only the generation that it was started in.
        """
        if self.world is None:
            return None
        continues = self.world.keeps_processes and self.continued_since <= started_in <= self.generation
        return self.generation if continues or started_in == self.generation else None

    def world_for(self, stage: int) -> World | None:
        """Returns the newest world that the torchrun of this stage may enter."""
        world = self._open_world
        return world if world is not None and world.stage == stage else None

    def world_answer(self, stage: int) -> WorldAnswer:
        """Returns what the handler in the torchrun of this stage is told."""
        return WorldAnswer(world=self.world_for(stage), complete=self.complete, stages_complete=self.stages_complete)

    def has_news(self, *, after: int, complete: int, stage: int = 0, stages: int = 0) -> bool:
        """Returns whether there is news for a handler that left world `after` and knows `complete` and `stages`."""
        world = self.world_for(stage)
        newer = world is not None and world.generation > max(after, self.left)
        return newer or self.complete > complete or self.stages_complete > stages

    @property
    def _open_world(self) -> World | None:
        """The newest world that a handler may enter."""
        return self.world if self.generation > self.left else None

    def refusal_of(self, world: World) -> str:
        """Returns why the node refuses a world; empty if it accepts it."""
        if self.leaving is not None:
            return f"this node is leaving: {self.leaving}"
        if world.generation < self.generation:
            return f"generation {world.generation} is over; this node is in {self.generation}"
        if world.generation == self.generation and world != self.world:
            return f"generation {world.generation} was handed out before, with another content"
        return ""


class StateFile:
    """Saves an `AgentState` to disk, as far as the disk allows it."""

    def __init__(self, folder: Path) -> None:
        self._file = KeptFile(folder / AGENT_STATE)

    def load(self) -> AgentState:
        """Returns the last saved state, or that of a new node."""
        content = self._file.read()
        if content is None:
            return AgentState()
        try:
            return AgentState.model_validate_json(content)
        except ValidationError as error:
            aside = self._file.set_aside(content)
            logger.error(
                "%s has invalid fields, which are ignored; the file is kept as %s: %s", AGENT_STATE, aside, error
            )
            return _without(content, {problem["loc"][0] for problem in error.errors() if problem["loc"]})

    def save(self, state: AgentState) -> None:
        """Saves the state. A write error is logged, and the write is retried at the next change."""
        self._file.write(state.model_dump_json().encode())

    @property
    def stale(self) -> bool:
        """Whether the disk rejected the newest state."""
        return self._file.stale


class KeptState:
    """The state of one incarnation: each change is saved, and wakes waiting tasks."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self.state = file.load()
        self.changed = Notifier()

    def keep(self, **changes: object) -> None:
        """Changes fields of the state."""
        before = replace(self.state.desired, version=0)
        self.state = self.state.model_copy(update=changes)
        if replace(self.state.desired, version=0) != before:
            self.state = self.state.model_copy(update={"version": self.state.version + 1})
        self._file.save(self.state)
        self.changed.fire()

    def keep_stale(self) -> None:
        """Retries to save a state that a full disk rejected."""
        if self._file.stale:
            self._file.save(self.state)


def _without(content: bytes, fields: set[int | str]) -> AgentState:
    """Returns the state without some of its fields, which another release may have written."""
    try:
        known: dict[str, Any] = json.loads(content)
        return AgentState.model_validate({name: value for name, value in known.items() if name not in fields})
    except (ValueError, AttributeError):
        return AgentState()
