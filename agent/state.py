"""What an agent must remember when it is killed and started again beside running training."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from agent.files import KeptFile
from perdure_launcher.layout import AGENT_STATE
from perdure_launcher.protocol import World

logger = logging.getLogger(__name__)


class NodeState(BaseModel):
    """One incarnation's memory."""

    version: int = 0
    """The version of what is desired of the launcher; it changes whenever that does."""
    run: bool = True
    """The command should run."""
    attempt: int = 1
    """The desired start of the command; the first one needs no request."""
    started_for: int = 0
    """The newest world that was known when that start was requested."""
    exited_attempt: int = 0
    """The newest start whose end was reported."""
    exited: str = ""
    """That report's identity: a launcher that heard no answer says it again."""
    mode: str = ""
    """How processes learn of their world, as the launcher said it: `torchrun` or `env`; empty before that."""
    script: bool = False
    """The command may do other work before it starts torchrun, as the launcher said it."""
    rendezvous_attempt: int = 0
    """The start of the command whose torchrun has said hello, and has ranks to run."""
    processes: int | None = None
    """Ranks that the node starts; None before the launcher or the handler reported it."""
    command_nodes: str | None = None
    """`--nnodes` as the command was given it, where that is not what the specification says."""
    handler: int | None = None
    """Process ID of the handler that said hello last."""
    left: int = 0
    """Worlds up to this one belong to a handler that is gone."""
    store_ports: tuple[int, ...] = ()
    """Ports on which the handler already listens."""
    ready_after: int | None = None
    """Waiting for a world newer than this one; None while not waiting."""
    world: World | None = None
    """The newest world that this node has received."""
    complete: int = 0
    """The newest generation that every rank of the job finished."""
    stages_complete: int = 0
    """How many torchruns of the command the job has finished."""
    command_restarts: int = 0
    """The newest `restart_command` that was followed."""
    superseded: int = 0
    """The newest generation in whose exit barrier torchrun requested a new start of the command."""
    entered: int = 0
    """The generation that the node's processes are in."""
    entered_at: datetime | None = None
    stepping: int = 0
    """The newest generation that was reported to run, or to step."""
    stepped: int = 0
    """The newest generation in which steps were seen and reported."""
    stalled: int = 0
    """The generation that was reported as stalled; 0 once it was reported to step again."""
    finished: int = 0
    """The newest generation that was reported to have ended well on this node."""
    failures: list[str] = []
    """Failures already reported, by what identifies them: a client that heard no answer says it again."""
    ended_by: str = ""
    """What ends the node from outside: whatever its processes do then is no news about the training."""
    leaving: str | None = None
    """Why the command must end for good; None while it may run."""
    leaving_grace: float = 0.0
    """Seconds that it then has, from SIGTERM to SIGKILL."""

    @property
    def generation(self) -> int:
        """The newest generation that this node has received; older ones are refused."""
        return self.world.generation if self.world else 0

    @property
    def prepares(self) -> bool:
        """The command does other work before its next torchrun: a download, an installation."""
        runs = self.run and self.exited_attempt < self.attempt and self.leaving is None
        return runs and self.script and self.rendezvous_attempt < self.attempt


class StateFile:
    """Keeps a `NodeState` on disk, as far as the disk lets it."""

    def __init__(self, run_dir: Path) -> None:
        self._file = KeptFile(run_dir / AGENT_STATE)

    def load(self) -> NodeState:
        """The last state kept, or a new node's."""
        content = self._file.read()
        if content is None:
            return NodeState()
        try:
            return NodeState.model_validate_json(content)
        except ValidationError as error:
            aside = self._file.set_aside(content)
            logger.error(
                "%s cannot be read whole; what is wrong is left out, kept as %s: %s", AGENT_STATE, aside, error
            )
            return _without(content, {problem["loc"][0] for problem in error.errors() if problem["loc"]})

    def save(self, state: NodeState) -> None:
        """Keeps the state; a disk that refuses is logged and tried again at the next change."""
        self._file.write(state.model_dump_json().encode())

    @property
    def stale(self) -> bool:
        """The disk refused the newest state."""
        return self._file.stale


def _without(content: bytes, fields: set[int | str]) -> NodeState:
    """The state without some of its fields: another release may have written them."""
    try:
        known: dict[str, Any] = json.loads(content)
        return NodeState.model_validate({name: value for name, value in known.items() if name not in fields})
    except (ValueError, AttributeError):
        return NodeState()
