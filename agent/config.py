"""Configuration of the agent: a file that the backend writes, so that no secret is on a command line."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from perdure.base.credentials.names import GATEWAY_NAME
from perdure.contract.identity import NodeCredentials
from perdure.spec.checkpoint import Checkpoint
from perdure.spec.preflight import Preflight
from perdure.spec.readiness import Readiness
from perdure.spec.timing import Timing

CONFIG_VARIABLE = "PERDURE_AGENT_CONFIG"


class ConfigError(Exception):
    """The agent cannot start with this configuration; the message says what to change."""


class GatewayRights(BaseModel):
    """Where an agent reaches the gateway, if Temporal is out of its reach, and what it may do there."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    address: str
    """Host and port of the gateway."""
    authority: str
    """The certificate, in PEM, of the only authority that may issue the gateway's certificate."""
    server_name: str = GATEWAY_NAME
    """The name in that certificate."""
    namespace: str
    """The Temporal namespace of the job."""
    grant: str
    """What this agent may do, signed by the worker or, for a machine that joined, by the gateway."""


class GatewayConnection(GatewayRights):
    """How an agent reaches the control plane where Temporal is out of its reach."""

    token_path: Path
    """The file of the pod's service account token, which Kubernetes renews, or of the machine's own."""


class AgentConfig(BaseModel):
    """The configuration of one agent. A direct connection to Temporal is configured by Temporal's own environment
    variables."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    node: NodeCredentials
    """The incarnation that this agent serves, with its token."""
    job_id: str
    """Workflow ID of the TrainingJob."""
    job_first_run_id: str
    """First run ID of the TrainingJob; another job may use the same name later."""
    group_id: str
    """Workflow ID of the NodeGroup."""
    task_queue: str
    """The node's own task queue."""
    address: str
    """The address at which other nodes reach this one."""
    host: str = ""
    """The machine's name, for users."""
    nodes: str
    """The node count of the job's specification, in torchrun's format: `4` or `2:4`."""
    run_dir: Path
    """The run directory, shared with the launcher. Its path is short: socket paths are limited to 108 bytes."""
    state_dir: Path | None = None
    """A folder of the agent alone, where training code may write to the run directory as another user; unset: the run
    directory."""
    timing: Timing = Timing()
    termination_grace: float = 30.0
    """Seconds that the command has to end after SIGTERM."""
    log_path: str = ""
    """The path of the node's log, for users, if the backend cannot know it."""
    gateway: GatewayConnection | None = None
    """Unset: the agent connects to Temporal itself."""
    checkpoint: Checkpoint | None = None
    """Checkpoints in storage, and copies of what scripts save; None where the job has neither."""
    awaits_state: bool = True
    """The command waits where the storage is not the one that the node has used before (`recovery.on_state_loss`)."""
    store_ports: str | None = None
    """The ports that may be listened on for other nodes, as in the specification; None for any free one."""
    copies_dir: Path | None = None
    """A folder in memory of the agent alone, for what other nodes have saved; unset: the machine's shared memory."""
    machine_dir: Path | None = None
    """A folder of the machine, which outlives its nodes, for what checks have measured; unset: there is none."""
    preflight: Preflight = Preflight.OFF
    """Checks of the machine that it makes before its node is taken into a world."""
    ready: Readiness | None = None
    """Where the command answers when it is ready; unset: it runs in a world of ranks."""
    log_patterns: dict[int, str] = {}
    """The patterns of `retry.rules`, by the number of the rule."""
    labels: dict[str, str] = {}
    """The job's labels, for metrics."""
    metrics_port: int | None = None
    """The port at which Prometheus reads the node's metrics; unset: only processes that reach the run directory do."""
    monitors: tuple[str, ...] = ()
    """Endpoints for Prometheus whose samples the agent writes to its event files: URLs, with prefixes after `#`."""
    outputs_logs: str | None = None
    """URL of a folder, in fsspec's format, to which the node's log is copied."""
    keep_all_logs: bool = True
    """Whether that is all of the log; otherwise a long one loses its middle, as `LogShipper` does it."""
    archived_events: str | None = None
    """URL of a folder to which the node's event files are copied; unset: they are not kept."""

    @property
    def stored(self) -> Checkpoint | None:
        """The checkpoints that the ranks make, where the job has a storage for them."""
        return self.checkpoint if self.checkpoint is not None and self.checkpoint.storage is not None else None

    @property
    def is_another_user(self) -> bool:
        """Whether the agent can read and write what the node's training code cannot."""
        return self.state_dir is not None

    @property
    def private_dir(self) -> Path:
        """The folder for what the agent keeps for itself."""
        return self.state_dir or self.run_dir

    @property
    def most_nodes(self) -> int:
        """The maximum number of nodes of the job."""
        return int(self.nodes.rpartition(":")[2])

    @classmethod
    def load(cls) -> AgentConfig:
        """Reads the file that `PERDURE_AGENT_CONFIG` names.

        Raises:
            ConfigError: if there is no such file, or it is not an agent configuration.
        """
        name = os.environ.get(CONFIG_VARIABLE)
        if not name:
            raise ConfigError(f"{CONFIG_VARIABLE} is not set: expected the path of the agent's configuration")
        try:
            return cls.model_validate_json(Path(name).read_bytes())
        except OSError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} is {name!r}, which cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} is {name!r}, which is not an agent configuration: {error}") from error
