"""The job specification: everything that a user specifies about a training job.

Field names are the standard terms of Kubernetes, Kueue, torchrun and Kubeflow. The models import little, since
workflows read specifications inside Temporal's sandbox.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator, model_validator

from .base import DnsLabel, JobName, LabelKey, LabelValue, RoleName, SecretReference, Section, Template, Variable
from .checkpoint import Checkpoint
from .data import Outputs, Volume, Workdir
from .durations import Duration
from .network import Network
from .notifications import MOST_TARGETS, Notification
from .preflight import Preflight
from .presets import Preset, with_preset
from .ray import RayJob
from .recovery import CapacityLoss, Limits, Recovery, Retry
from .role_relations import check_relations
from .roles import Role
from .rules import RuleAction
from .timing import Timing


class Backend(StrEnum):
    """The source of a job's nodes."""

    LOCAL = "local"
    """Processes on the worker's machine."""
    KUBERNETES = "kubernetes"
    """Pods."""
    JOINED = "joined"
    """Machines that another system started, such as Slurm, and that join by `perdure join`."""
    RAY = "ray"
    """Actors of a Ray cluster."""


class JobSpec(Section):
    """A training job."""

    name: JobName
    """The name of the job; unique in its namespace while it runs."""
    namespace: DnsLabel = "default"
    """The tenant: the namespace on Kubernetes, and part of the workflow's ID."""
    labels: dict[LabelKey, LabelValue] = Field(default={})
    """Labels for searching and accounting; they are copied to pods, metrics and reports."""
    backend: Backend = Backend.LOCAL
    """The source of nodes. `--backend` on the command line overrides it."""
    runtime: DnsLabel | None = None
    """The name of an administrator's preset; when the job starts, it fills in fields that this specification leaves
    out."""
    preset: Preset | None = None
    """The kind of the job, which fills in roles and their relations: `parameter-server` makes a chief, workers,
    parameter servers and an evaluator of TensorFlow find each other, of the numbers of nodes and one command."""
    queue: str | None = None
    """The queue of Kueue or Volcano that admits the job."""
    priority_class: str | None = None
    """The Kubernetes PriorityClass of the job's pods."""
    workdir: Workdir | None = None
    """The folder that commands run in."""
    env: dict[Variable, Template] = Field(default={}, repr=False)
    """Environment variables of the processes of all roles. `${job.name}` and `${job.namespace}` are filled in."""
    secrets: dict[Variable, SecretReference] = Field(default={})
    """Environment variables whose value is taken from a secret, as name/key: on Kubernetes a Secret of the job's
    namespace, elsewhere a secret of each machine (`perdure secret set`); values never enter Temporal."""
    volumes: list[Volume] = Field(default=[])
    """Persistent volume claims, mounted in every node."""
    roles: dict[RoleName, Role]
    """The job's nodes, by the name of their role. Several roles run different commands: see docs/roles.md."""
    ray: RayJob = RayJob()
    """What a Ray cluster prepares for the nodes."""
    network: Network = Network()
    """The network between nodes."""
    recovery: Recovery = Recovery()
    """Replacement of lost nodes, and restarts of ranks."""
    retry: Retry = Retry()
    """Limits on the number of repairs before the job stops."""
    preflight: Preflight = Preflight.OFF
    """Checks of each new node's machine: `off`, `quick`, or `full` with its devices. A node that fails one which other
    nodes pass is not taken in, and its machine is avoided: see docs/checks.md."""
    limits: Limits = Limits()
    """Time limits of the job and its parts."""
    outputs: Outputs = Outputs()
    """The place for the job's outputs."""
    notifications: dict[DnsLabel, Notification] = Field(default={}, max_length=MOST_TARGETS)
    """Whom the job tells about incidents, stalls, a restart budget that is nearly spent, and its end, by a name for
    each, at most 8: see docs/notifications.md."""
    checkpoint: Checkpoint | None = None
    """Checkpoints in storage, which survive the loss of all nodes, and copies of what scripts save by themselves.
    Unset: disabled."""
    hold_on_failure: Duration | None = None
    """The time for which the nodes of a failed job are kept as they are, for inspection: `perdure shell` opens a shell
    in one, `perdure cancel` releases them earlier. Unset: disabled."""
    ttl_after_finished: Duration | None = None
    """The time after the job's end when the TrainingJob object that it was created from is deleted; unset: never. Jobs
    without such an object leave nothing in a cluster."""
    timing: Timing = Timing()
    """Intervals, timeouts and grace periods of Perdure itself."""

    def env_of(self, role: str) -> dict[str, str]:
        """The environment variables of a role's processes."""
        return {**self.env, **self.roles[role].env}

    @property
    def tells_addresses(self) -> bool:
        """The nodes know where those of all roles are reached: there are several roles, or one that serves."""
        return len(self.roles) > 1 or any(role.ready is not None for role in self.roles.values())

    @property
    def stored(self) -> Checkpoint | None:
        """`checkpoint`, where the ranks' own checkpoints have a storage."""
        return self.checkpoint if self.checkpoint is not None and self.checkpoint.storage is not None else None

    @model_validator(mode="before")
    @classmethod
    def _has_what_its_preset_adds(cls, data: Any) -> Any:
        return with_preset(data)

    @field_validator("roles")
    @classmethod
    def _has_related_roles(cls, roles: dict[str, Role]) -> dict[str, Role]:
        if not roles:
            raise ValueError("expected one role, such as worker")
        check_relations(roles)
        return roles

    @model_validator(mode="after")
    def _has_nodes_for_copies(self) -> JobSpec:
        most = max((role.nodes.max for role in self.roles.values()), default=0)
        if self.checkpoint is not None and self.checkpoint.copies_to_nodes and most < 2:
            raise ValueError(
                f"checkpoint.watch is {self.checkpoint.watch} without checkpoint.storage, and nodes is {most}: the "
                "copies are in the memory of another node; set nodes to at least 2, or set checkpoint.storage"
            )
        return self

    @model_validator(mode="after")
    def _may_replace_what_its_rules_replace(self) -> JobSpec:
        replacing = [index for index, rule in enumerate(self.retry.rules) if rule.action is RuleAction.REPLACE]
        if replacing and self.recovery.on_capacity_loss is CapacityLoss.FAIL:
            raise ValueError(
                f"retry.rules[{replacing[0]}].action is replace, and recovery.on_capacity_loss is fail, which stops a "
                "job that loses a node; set action to stop, or on_capacity_loss to wait or shrink"
            )
        return self

    @model_validator(mode="after")
    def _sets_each_variable_once(self) -> JobSpec:
        own = {f"roles.{name}.env": role.env for name, role in self.roles.items()}
        for place, env in {"env": self.env, **own}.items():
            if both := sorted(env.keys() & self.secrets.keys()):
                raise ValueError(f"{', '.join(both)} is in {place} and in secrets; expected one of them")
        return self
