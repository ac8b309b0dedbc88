"""The job specification: everything that a person says about a training job.

Field names are the standard terms of Kubernetes, Kueue, torchrun and Kubeflow. The models import little, since
workflows read specifications inside Temporal's sandbox.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator, model_validator

from .base import DnsLabel, JobName, LabelKey, LabelValue, Matching, RoleName, SecretReference, Section, Template
from .data import Outputs, Volume, Workdir
from .durations import Duration
from .network import Network
from .recovery import Limits, Recovery, Retry
from .roles import Role
from .timing import Timing


class Backend(StrEnum):
    """Where nodes come from."""

    LOCAL = "local"
    """Processes on the worker's machine."""
    KUBERNETES = "kubernetes"
    """Pods."""
    JOINED = "joined"
    """Nodes that someone else started, such as Slurm, and that join by `perdure join`."""


OWN_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""What the rendezvous sets for each process, and users may not."""


def _is_not_ours(name: str) -> str:
    if name in OWN_VARIABLES:
        raise ValueError(f"{name} is set for each process by the rendezvous; remove it")
    if name.startswith("PERDURE_"):
        raise ValueError("names that begin with PERDURE_ are Perdure's own; rename it")
    if name.startswith("PET_"):
        raise ValueError(f"{name} is an option of torchrun that Perdure sets; use nodes and nproc_per_node")
    return name


Variable = Annotated[
    str,
    Matching(
        pattern=r"[A-Za-z_][A-Za-z0-9_]*", expected="the name of an environment variable: letters, digits, underscores"
    ),
    AfterValidator(_is_not_ours),
]
"""The name of an environment variable that users may set."""


class JobSpec(Section):
    """A training job."""

    name: JobName
    """What the job is called; unique in its namespace while it runs."""
    namespace: DnsLabel = "default"
    """The tenant: the namespace on Kubernetes, and part of the workflow's ID."""
    labels: dict[LabelKey, LabelValue] = Field(default={})
    """Labels for finding and accounting; they go to pods, metrics and reports."""
    backend: Backend = Backend.LOCAL
    """Where nodes come from. `--backend` on the command line wins over it."""
    runtime: DnsLabel | None = None
    """The name of an administrator's preset, laid under this specification when the job starts."""
    queue: str | None = None
    """The queue of Kueue or Volcano that admits the job."""
    priority_class: str | None = None
    """Kubernetes' PriorityClass of the job's pods."""
    workdir: Workdir | None = None
    """The folder that commands run in."""
    env: dict[Variable, Template] = Field(default={})
    """Environment variables of the job's processes. `${job.name}` and `${job.namespace}` are filled in."""
    secrets: dict[Variable, SecretReference] = Field(default={})
    """Environment variables whose value is a secret's, as name/key; values never enter Temporal."""
    volumes: list[Volume] = Field(default=[])
    """Persistent volume claims, mounted in every node."""
    roles: dict[RoleName, Role]
    """The job's nodes, by the name of their role; this release runs exactly one role."""
    network: Network = Network()
    """How nodes reach each other."""
    recovery: Recovery = Recovery()
    """How a lost node is made up for."""
    retry: Retry = Retry()
    """How often failures are repaired before the job stops."""
    limits: Limits = Limits()
    """How long the job and its parts may take."""
    outputs: Outputs = Outputs()
    """Where what the job leaves behind is kept."""
    hold_on_failure: Duration | None = None
    """How long the nodes of a failed job are kept as they are, for inspection: `perdure shell` opens a shell in one,
    `perdure cancel` releases them before. Unset: disabled."""
    ttl_after_finished: Duration | None = None
    """How long after its end the TrainingJob object that the job was made of is deleted; unset: never. Of other jobs
    nothing is left in a cluster."""
    timing: Timing = Timing()
    """Intervals, timeouts and graces of Perdure itself."""

    @property
    def role(self) -> tuple[str, Role]:
        """The job's one role and its name."""
        ((name, role),) = self.roles.items()
        return name, role

    @field_validator("roles")
    @classmethod
    def _has_one_role(cls, roles: dict[str, Role]) -> dict[str, Role]:
        if not roles:
            raise ValueError("expected one role, such as worker")
        if len(roles) > 1:
            raise ValueError(f"has {len(roles)} roles ({', '.join(roles)}); this release runs exactly one role per job")
        return roles

    @model_validator(mode="after")
    def _sets_each_variable_once(self) -> JobSpec:
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"{', '.join(both)} is in env and in secrets; expected one of them")
        return self
