"""Models of the fields of Kubernetes objects that Perdure reads; all other fields are ignored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from perdure.activities.nodes.kubernetes.naming import INCARNATION, RANK


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)


class OwnerReference(_Part):
    """A reference to the object that owns this one; the two are deleted together."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Metadata(_Part):
    name: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    finalizers: tuple[str, ...] = ()
    deletion_timestamp: datetime | None = None


class Terminated(_Part):
    """The state of a container that has ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


class Waiting(_Part):
    """The state of a container that does not run yet."""

    reason: str = ""
    message: str = ""


class ContainerState(_Part):
    running: dict[str, str] | None = None
    terminated: Terminated | None = None
    waiting: Waiting | None = None


class Resources(_Part):
    limits: dict[str, str] = {}


class ContainerStatus(_Part):
    name: str
    ready: bool = False
    state: ContainerState = ContainerState()
    resources: Resources = Resources()
    """What the kubelet has given it."""


class Condition(_Part):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class PodStatus(_Part):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Container(_Part):
    name: str
    resources: Resources = Resources()


class SchedulingGate(_Part):
    name: str


class ReadinessGate(_Part):
    """A condition that a pod needs to be ready, and that another program sets."""

    condition_type: str


class Affinity(_Part):
    pod_affinity: dict[str, Any] | None = None
    """The other pods near which this one is placed."""


class Toleration(_Part):
    key: str = ""
    toleration_seconds: int | None = None


class PodSpec(_Part):
    node_name: str = ""
    affinity: Affinity = Affinity()
    tolerations: tuple[Toleration, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    readiness_gates: tuple[ReadinessGate, ...] = ()
    containers: tuple[Container, ...] = ()


class Pod(_Part):
    """A pod, with the fields that determine its node's state."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def rank(self) -> int:
        return int(self.metadata.labels[RANK])

    @property
    def incarnation(self) -> int:
        return int(self.metadata.labels[INCARNATION])

    @property
    def never_runs(self) -> bool:
        """Whether the pod was deleted before it was scheduled, so that only its finalizers keep it."""
        return self.metadata.deletion_timestamp is not None and not self.spec.node_name

    def container_status(self, name: str) -> ContainerStatus | None:
        return next((one for one in self.status.container_statuses if one.name == name), None)

    def condition(self, kind: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == kind), None)


class Involved(_Part):
    uid: str = ""


class Series(_Part):
    last_observed_time: datetime | None = None


class PodEvent(_Part):
    """An Event about a pod."""

    type: str = ""
    reason: str = ""
    message: str = ""
    involved_object: Involved = Involved()
    event_time: datetime | None = None
    last_timestamp: datetime | None = None
    series: Series | None = None

    @property
    def time(self) -> datetime:
        """The last time at which it happened."""
        times = (self.series and self.series.last_observed_time, self.last_timestamp, self.event_time)
        return max((time for time in times if time), default=datetime.min.replace(tzinfo=UTC))
