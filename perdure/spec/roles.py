"""The nodes of a job: their number, their command and the resources they need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, JsonValue, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from .base import DnsLabel, Integer, RoleName, Section, Template, Variable
from .object_references import SecretName
from .quantities import Amount, amount, bytes_of
from .ray import RayRole
from .readiness import LARGEST_PORT, Readiness
from .scaling import Scaling

MAX_NODES = 2_000
"""The most nodes of one role: twice the largest job that was run. The state of a job of 5,000 nodes can continue as
new, too, with 0.5 MB of the 2 MB that the server accepts."""

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?")


class NodeCount(Section):
    """The number of nodes that train together. Also written `16` (fixed) or `"2:8"` (min and max)."""

    min: Integer = Field(ge=1, le=MAX_NODES)
    """The fewest nodes that form a world."""
    max: Integer = Field(ge=1, le=MAX_NODES)
    """The number of nodes that are requested, and the most that form a world. A value above `min` makes the job
    elastic: a smaller world has a smaller global batch unless the script adapts."""
    auto: bool = False
    """As many as jobs of the past that are like this one had, else 1, with `resources: auto`. `nodes: auto` is short
    for it."""
    unit: Integer = Field(default=1, ge=1)
    """Worlds are formed with a multiple of this many nodes, such as the nodes that hold one model replica."""

    written_as: ClassVar[str] = (
        "a number of nodes such as 4, a range such as 2:8, auto, or a mapping of min, max and unit"
    )

    @property
    def elastic(self) -> bool:
        """Whether worlds may differ in size."""
        return self.min < self.max

    def __str__(self) -> str:
        """The count in the form of torchrun's `--nnodes`; `auto` until it is known."""
        if self.auto:
            return "auto"
        return f"{self.min}:{self.max}" if self.elastic else str(self.max)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(schema))
        shorthand = {"type": "string", "pattern": r"^(auto|\s*[0-9]{1,9}\s*(:\s*[0-9]{1,9}\s*)?)$", "examples": ["2:8"]}
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_NODES}, shorthand, mapping]}

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        if value and isinstance(value, (Mapping, NodeCount)):
            return cast("Any", value)
        if value == "auto":
            return {"min": 1, "max": 1, "auto": True}
        plain = isinstance(value, int | str) and not isinstance(value, bool)
        match = _RANGE.fullmatch(str(value)) if plain else None
        if match is None:
            raise ValueError(f"expected {cls.written_as}")
        least, most = int(match[1]), int(match[2] or match[1])
        if least < 1:
            raise ValueError("expected at least 1 node")
        if most > MAX_NODES:
            raise ValueError(f"expected at most {MAX_NODES} nodes")
        return {"min": least, "max": most}

    @model_validator(mode="after")
    def _is_consistent(self) -> NodeCount:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}; expected min to be at most max")
        if self.min % self.unit or self.max % self.unit:
            raise ValueError(
                f"unit is {self.unit}; expected min ({self.min}) and max ({self.max}) to be multiples of it"
            )
        return self


def _read_processes(value: Any) -> Any:
    if value is None:
        return "auto"
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value in ("gpu", "auto") or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024):
        return value
    raise ValueError("expected an integer from 1 to 1024, gpu or auto")


Processes = Annotated[
    int | Literal["gpu", "auto"],
    BeforeValidator(_read_processes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1024}, {"enum": ["gpu", "auto", None]}]}),
]
"""Processes per node: a number, `gpu` (one per GPU) or `auto` (one per GPU, or 1 where there is none)."""


class RendezvousMode(StrEnum):
    """Ways in which the processes of a node get their world."""

    AUTO = "auto"
    """From torchrun if the command starts it, else from environment variables."""
    TORCHRUN = "torchrun"
    """The command starts torchrun, which calls Perdure's rendezvous handler."""
    ENV = "env"
    """The command is started once per process, with `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and the like set."""


class ImagePullPolicy(StrEnum):
    """When Kubernetes pulls the image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Resources(Section):
    """Resources that one node needs, in Kubernetes' quantities. Also written `auto`."""

    auto: bool = False
    """Takes `cpu`, `memory` and `shm`, where they are not given, from jobs of the past that are like this one, else
    from a default (docs/scaling.md). `resources: auto` is short for it."""

    cpu: Amount | None = None
    """CPU cores, such as 96 or 500m."""
    memory: Amount | None = None
    """Main memory in bytes, such as 1Ti."""
    gpu: Integer = Field(default=0, ge=0)
    """Number of GPUs."""
    gpu_type: str | None = None
    """The GPU's product name, such as H100, as the nodes of the cluster are labelled."""
    shm: Amount | None = None
    """Size of /dev/shm in bytes, such as 128Gi; data loaders and NCCL use it."""

    written_as: ClassVar[str] = "auto, or a mapping of cpu, memory, gpu, gpu_type and shm"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(schema))
        return {"anyOf": [{"type": "string", "enum": ["auto"]}, mapping]}

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value


class TolerationOperator(StrEnum):
    """Ways in which a toleration matches a taint."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """Effects of a taint on pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Section):
    """A taint of machines that nodes of this role accept."""

    key: str | None = None
    """The taint's key; none matches every key, with the operator Exists."""
    operator: TolerationOperator = TolerationOperator.EQUAL
    """Exists matches any value, Equal matches `value`."""
    value: str | None = None
    """The taint's value."""
    effect: TaintEffect | None = None
    """The taint's effect; none matches every effect."""


class Topology(Section):
    """The distance between the nodes, by a level of the cluster's topology such as rack or block."""

    preferred: str | None = None
    """Nodes share this level if there is room."""
    required: str | None = None
    """Nodes share this level, or wait."""

    @model_validator(mode="after")
    def _names_one(self) -> Topology:
        if (self.preferred is None) == (self.required is None):
            raise ValueError("expected exactly one of preferred and required")
        return self


_LONGEST_COMMAND_TEXT = 2_000
"""Characters of a command as one text for which an error shows the list that is expected."""


def _refuse_command_text(value: Any) -> Any:
    if isinstance(value, str):
        # Python's parser of shell words takes quadratic time.
        if len(value) > _LONGEST_COMMAND_TEXT:
            raise ValueError("expected a list with the program and its arguments")
        try:
            words = shlex.split(value)
        except ValueError:
            words = value.split()
        if not words:
            raise ValueError("expected a list with the program and its arguments")
        # A list of words would lose a shell's syntax.
        if any(re.search(r"[|&;<>()`]|\$[A-Za-z_{(]", word) for word in words):
            words = ["bash", "-c", value]
        raise ValueError(f"expected a list: [{', '.join(_yaml_word(word) for word in words)}]")
    return value


def _yaml_word(word: str) -> str:
    plain = re.fullmatch(r"[-./A-Za-z_][-./=A-Za-z0-9_]*", word) and word.lower() not in _YAML_WORDS
    return word if plain else "'" + word.replace("'", "''") + "'"


_YAML_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "-", "--", "---", "."}

Command = Annotated[list[Template], BeforeValidator(_refuse_command_text), Field(min_length=1)]
"""A program and its arguments, as a list: no shell reads it."""


class Condition(StrEnum):
    """States of a role that another role may wait for before it starts."""

    COMPLETED = "completed"
    """All its commands have ended with 0."""
    READY = "ready"
    """Its nodes answer at their port or run in their world, or it has completed."""


class OnFailure(StrEnum):
    """Reaches of a failure in a role."""

    ROLE = "role"
    """The role alone is repaired; if that is impossible, the job stops."""
    JOB = "job"
    """All roles start again with it."""
    IGNORE = "ignore"
    """The role alone is repaired; if that is impossible, the job continues without it."""


class Role(Section):
    """Nodes that run the same command."""

    nodes: NodeCount
    """The number of nodes: `16` is fixed, `"2:8"` or a mapping of min, max and unit is elastic; at most 2,000."""
    nproc_per_node: Processes = "auto"
    """Processes (ranks) per node, torchrun's term: a number, `gpu` for one per GPU, or `auto` for one per GPU if the
    node has any, else 1."""
    scaling: Scaling = Scaling()
    """The choice of the number of nodes, where `nodes` is elastic."""
    command: Command
    """The program and its arguments, such as `[torchrun, train.py]`. No shell reads it."""
    env: dict[Variable, Template] = Field(default={}, repr=False)
    """Environment variables of this role's processes, which replace those of the job with the same names."""
    rendezvous: RendezvousMode = RendezvousMode.AUTO
    """The way in which processes get their world: `torchrun`; `env` for commands that read `RANK`, `WORLD_SIZE` and the
    like themselves; or `auto`, which chooses by the command."""
    ready: Readiness | None = None
    """Set for a role without a torch world, such as parameter servers or an inference engine: each node has one
    process, is ready once it answers here, and depends on no other node of the role. Unset: the nodes form a world."""
    depends_on: dict[RoleName, Condition] = Field(default={})
    """The roles that this one waits for before it starts, each `ready` or `completed`."""
    ends_job: bool | None = None
    """Whether the job succeeds when this role, and all others with true, have completed; the rest is then ended. Unset
    everywhere: the roles `trainer`, `worker` and `chief`, else all that form a world, else all."""
    on_failure: OnFailure = OnFailure.ROLE
    """The reach of a failure: `role`, this role alone is repaired; `job`, all roles start again with it; `ignore`, as
    `role`, and the job continues without a role that cannot be repaired."""
    restart_with: list[RoleName] = Field(default=[])
    """The roles that start again whenever this one does."""
    restart_on_scale: list[RoleName] = Field(default=[])
    """The roles that start again whenever this one has another number of nodes, such as a coordinator that learns all
    addresses at its start."""
    collocate: list[RoleName] = Field(default=[])
    """The roles with which this one shares machines: node N of each runs on the same machine. Stated on one of them."""
    node_group: Integer = Field(default=1, ge=1, le=MAX_NODES)
    """The number of consecutive nodes that are replaced together, as those of one rack: nodes 0 to 3, 4 to 7 and so on
    for 4. The loss of one replaces all of its group."""
    python: str | None = None
    """The interpreter for Perdure's launcher inside the image; by default `python3`, else `python`. On Ray, the
    interpreter of its machines that has Perdure; by default Ray's own."""
    image: str | None = None
    """The container image; any with Python and PyTorch."""
    image_pull_policy: ImagePullPolicy | None = None
    """When Kubernetes pulls the image; unset: Kubernetes' own default."""
    image_pull_secrets: list[SecretName] = Field(default=[])
    """Names of the secrets that the image's registry requires."""
    resources: Resources = Resources()
    """Resources that one node needs."""
    ray: RayRole = RayRole()
    """What Ray provides for one node, in addition to `resources`."""
    ports: dict[DnsLabel, Annotated[Integer, Field(ge=1, le=LARGEST_PORT)]] = Field(default={})
    """Ports, by name, that nodes open for people, such as `{tensorboard: 6006}`."""
    tolerations: list[Toleration] = Field(default=[])
    """Taints of machines that the nodes accept."""
    topology: Topology | None = None
    """The distance between the nodes."""
    pod_template: dict[str, JsonValue] = Field(default={})
    """Kubernetes' PodTemplateSpec, merged over the one that Perdure makes, containers by name; for everything that has
    no field."""

    @model_validator(mode="after")
    def _has_whole_groups(self) -> Role:
        if self.nodes.min % self.node_group or self.nodes.max % self.node_group:
            raise ValueError(
                f"node_group is {self.node_group}, and nodes is {self.nodes}; set nodes to a multiple of it"
            )
        return self

    @model_validator(mode="after")
    def _has_a_choice(self) -> Role:
        if not self.scaling.measures:
            return self
        policy = "scaling.share is true" if self.scaling.share else f"scaling.policy is {self.scaling.policy}"
        if self.ready is not None:
            raise ValueError(
                f"{policy}, and a role with ready makes no steps whose speed is known; leave one of them out"
            )
        if not self.nodes.elastic:
            raise ValueError(f"{policy}, and nodes is {self.nodes}, which leaves no choice; give a range such as 2:8")
        return self

    @model_validator(mode="after")
    def _has_some_number_of_nodes(self) -> Role:
        if self.nodes.auto and not self.resources.auto:
            raise ValueError(
                "nodes is auto, and resources is not, so no job of the past is asked; give a number of nodes, or set "
                "resources to auto"
            )
        return self

    @model_validator(mode="after")
    def _may_have_what_it_requests(self) -> Role:
        most, memory = self.scaling.memory_max, self.resources.memory
        if most is not None and memory is not None and bytes_of(most) < bytes_of(memory):
            raise ValueError(
                f"scaling.memory_max is {most}, and resources.memory is {memory}; set memory_max to more than that"
            )
        return self

    @model_validator(mode="after")
    def _relaxes_what_it_requests(self) -> Role:
        for field in ("cpu", "memory"):
            least, full = getattr(self.scaling.relax, field, None), getattr(self.resources, field)
            if least is None or self.resources.auto:
                continue
            if full is None or amount(least) >= amount(full):
                raise ValueError(
                    f"scaling.relax.{field} is {least}, and resources.{field} is {full or 'not set'}; set it to less "
                    f"than resources.{field}, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _serves_with_one_process(self) -> Role:
        if self.ready is None:
            return self
        if self.nproc_per_node not in ("auto", 1):
            raise ValueError(
                f"nproc_per_node is {self.nproc_per_node}, and a node of a role with ready has one process; leave "
                "nproc_per_node out, and set nodes to the number of processes"
            )
        if self.rendezvous is RendezvousMode.TORCHRUN:
            raise ValueError("rendezvous is torchrun, and a role with ready forms no world; leave one of them out")
        return self
