"""What an agent is told when it starts: a file that the backend writes, so that nothing secret is on a command line."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from perdure.spec.timing import Timing
from workflows.messages import NodeIdentity
from workflows.names import NODES_PER_GROUP

CONFIG_VARIABLE = "PERDURE_AGENT_CONFIG"


class ConfigError(Exception):
    """The agent cannot start with this configuration; the message says what to change."""


class AgentConfig(BaseModel):
    """One agent's configuration. How to reach Temporal is not in it: Temporal's own environment variables say that."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    node: NodeIdentity
    """The incarnation that this agent serves, with its token."""
    job_id: str
    """Workflow ID of the TrainingJob."""
    job_first_run_id: str
    """First run ID of the TrainingJob: the same name may be used again by another job."""
    job_name: str
    job_namespace: str
    group_id: str
    """Workflow ID of the NodeGroup."""
    task_queue: str
    """The node's own."""
    address: str
    """Where other nodes reach this one."""
    host: str = ""
    """The machine's name, for people."""
    nodes: str
    """As the job's specification has it, in torchrun's form: `4` or `2:4`."""
    processes: int | Literal["gpu", "auto"] = "auto"
    """Ranks per node, as the specification has it; the launcher or the handler says what that came to."""
    run_dir: Path
    """The folder shared with the launcher. Its path is short: socket paths are limited to 108 bytes."""
    timing: Timing = Timing()
    termination_grace: float = 30.0
    """Seconds that the launcher gives the command to end."""
    log_path: str = ""
    """Where people find the node's log, where the backend cannot know that."""
    outputs_logs: str | None = None
    """URL of a folder, as fsspec takes it, that the node's log is copied to."""

    @property
    def most_nodes(self) -> int:
        """How many nodes the job may have."""
        return int(self.nodes.rpartition(":")[2])

    @property
    def first_interval(self) -> timedelta:
        """Between two heartbeat signals until a lease says it. Until then no workflow needs them, and a group that is
        about to give many leases has enough to do."""
        return self.timing.signals.interval(min(self.most_nodes, NODES_PER_GROUP))

    @classmethod
    def load(cls) -> AgentConfig:
        """Reads the file that `PERDURE_AGENT_CONFIG` names.

        Raises:
            ConfigError: if there is none, or it is no such configuration.
        """
        name = os.environ.get(CONFIG_VARIABLE)
        if not name:
            raise ConfigError(f"{CONFIG_VARIABLE} is not set: expected the path of the agent's configuration")
        try:
            return cls.model_validate_json(Path(name).read_bytes())
        except OSError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} is {name!r}, which cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} is {name!r}, which is no agent configuration: {error}") from error
