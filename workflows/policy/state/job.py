"""The state of one job: there is no other, and continue-as-new carries it whole.

Values are immutable; a decision makes new ones. Each role is decided by itself, and what it decides may concern the
whole job: an incident, a restart that counts, the end. So a decision takes and returns a `RoleInJob`, which has the
role's state and the job's facts side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Self, cast

from pydantic import Field, model_validator

from perdure.contract import (
    IncidentView,
    JobPhase,
    Message,
    NodeCredentials,
    Ticket,
    UnprocessedSamples,
    UnreadableDataset,
)
from perdure.contract.base import ShortText, Time
from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import CURRENT, Behavior
from perdure.workflows.policy.state.node import MachineLoss
from perdure.workflows.policy.state.role import RoleState

_LEADING_PHASES = (JobPhase.WAITING, JobPhase.RECOVERING, JobPhase.STARTING, JobPhase.RENDEZVOUS)
"""Phases of a role that are the whole job's, the strongest first; otherwise the first role's phase is. A role without
nodes leads only where no other has any."""


class UnknownRole(ValueError):
    """A request names a role that the job does not have, or none although it has several."""

    def __init__(self, name: str | None, roles: Iterable[str]) -> None:
        names = [f'"{role}"' for role in roles]
        got = f'got "{name}"' if name else "missing"
        known = f"the role {names[0]}" if len(names) == 1 else f"the roles {', '.join(names)}"
        super().__init__(f"role: {got}; this job has {known}")


class Shortage(Message):
    """The Temporal server refuses calls of the job's agents for lack of capacity."""

    cause: ShortText
    """The server's text."""
    since: Time
    until: Time
    """It is over from then on, unless an agent reports it again."""
    general: bool = True
    """Whether at least half of the agents that report to the job report it: the silence of any agent then says nothing
    about its node. Otherwise that holds for the agents that report it."""


class Outcome(Message):
    """The end of the job; its nodes are wound down before it closes."""

    phase: JobPhase
    exit_code: int
    reason: str
    decided_at: datetime
    held_until: datetime | None = None
    """The time until which the nodes are kept for inspection: see `perdure.workflows.policy.repair.hold_on_failure`."""


class JobFacts(Message):
    """What all roles of a job share."""

    behavior: Behavior = CURRENT
    """The behavior of the current run, set when a run begins."""
    name: str
    namespace: str
    uid: str
    started_at: datetime
    suspended: bool = False
    """A user has suspended the whole job."""
    tickets: tuple[Ticket, ...] = ()
    """Tickets for joining through the gateway that were not revoked; expired ones let their machines come back."""
    incidents: tuple[IncidentView, ...] = ()
    incident_count: int = 0
    losses: tuple[MachineLoss, ...] = ()
    """Losses that speak against machines, in the order in which nodes were replaced: see
    `perdure.workflows.policy.capacity.node_avoidance`."""
    restart_count: int = 0
    """Restarts that failures caused since the job began; nodes lost together or soon after one another count once."""
    repairs_paused_until: datetime | None = None
    """Until then hangs, slow ranks, bad numbers and wrong results are shown and not acted on, at a user's
    request; None where they are acted on."""
    repairs_paused_because: str = ""
    """The user's reason."""
    control_lag_until: datetime | None = None
    """Set when reports came late: the control plane was unavailable, and agents may take seconds to poll again."""
    shortage: Shortage | None = None
    """What the Temporal server lacks for its part; None where no agent has reported any of late."""
    outcome: Outcome | None = None
    unprocessed: dict[str, UnprocessedSamples] = Field(default={})
    """What was set aside, by dataset."""
    unreadable: dict[str, UnreadableDataset] = Field(default={})
    """Datasets of which nothing can be read."""
    wrong_claims: int = 0
    """What nodes have reported of ranks or worlds that are not theirs: see
    `perdure.workflows.policy.diagnosis.claims`."""
    last_wrong_claim: str = ""
    dropped_events: int = 0
    """Events that could not be decided on: a defect of this release, or a malformed message."""
    last_dropped: str = ""
    """The type and the error of the last dropped event."""

    @property
    def held(self) -> bool:
        """It has failed, and its nodes are kept for inspection."""
        return self.outcome is not None and self.outcome.held_until is not None


class RoleInJob(RoleState, JobFacts):
    """One role with the facts of its job: what the decisions on a role take and return."""

    @classmethod
    def of(cls, job: JobState, role: RoleState) -> Self:
        """Returns a role beside the facts of its job, which are not validated again.

        A decision takes several of these, and `model_construct` asks each field for its aliases: a third of its time.
        """
        fields = vars(job) | vars(role)
        del fields["roles"]
        view = cls.__new__(cls)
        object.__setattr__(view, "__dict__", fields)
        object.__setattr__(view, "__pydantic_fields_set__", role.__pydantic_fields_set__)
        object.__setattr__(view, "__pydantic_extra__", None)
        object.__setattr__(view, "__pydantic_private__", None)
        return view

    @property
    def rests(self) -> bool:
        """The role is suspended, by itself or with the job."""
        return self.suspended or self.suspended_alone

    def stop(self, outcome: Outcome) -> Self:
        """The state after the decision how the job ends."""
        return self.replace(outcome=outcome, interruption=None)

    def is_current(self, sender: NodeCredentials) -> bool:
        """Whether the sender is a desired incarnation of this run, and proves it by its token."""
        node = self.nodes.get(sender.rank)
        known = node is not None and node.alive and (sender.incarnation, sender.token) == (node.incarnation, node.token)
        return known and sender.uid == self.uid

    @property
    def open_incident(self) -> IncidentView | None:
        """The last incident, while its world does not run yet."""
        incident = self.last_incident
        return incident if incident is not None and incident.over_at is None else None

    @property
    def last_incident(self) -> IncidentView | None:
        """The last interruption, ignoring observations."""
        interruptions = (one for one in reversed(self.incidents) if one.observation is None)
        return next((one for one in interruptions if one.role == self.role), None)

    @property
    def own_incidents(self) -> tuple[IncidentView, ...]:
        """The incidents of this role."""
        return tuple(one for one in self.incidents if one.role == self.role)


class JobState(JobFacts):
    """One job. `perdure.workflows.policy.decide.decide` is the only writer."""

    roles: dict[str, RoleState]
    """The roles in the order of the specification, in which they are decided."""
    unknown_groups: dict[str, tuple[int, ...]] = Field(default={})
    """Groups, by their role, that an earlier run of a job of several roles has adopted, and of whose nodes it did not
    learn before it ended."""

    @model_validator(mode="before")
    @classmethod
    def _has_budgets_by_role(cls, data: Any) -> Any:
        """Reads the state of a job of one role under release 0.3, in which the restarts were the job's."""
        if isinstance(data, dict) and (restarts := cast("dict[str, Any]", data).get("restarts")):
            roles: dict[str, dict[str, Any]] = data["roles"]
            ((name, role),) = roles.items()
            return {**data, "roles": {name: {"restarts": restarts, **role}}}
        return cast("Any", data)

    @classmethod
    def begin(cls, job: JobSpec, *, uid: str, now: datetime) -> Self:
        """Returns the state of a job of which nothing but its specification is known."""
        roles = {
            name: RoleState(role=name, nodes_min=role.nodes.min, nodes_max=role.nodes.max, unit=role.nodes.unit)
            for name, role in job.roles.items()
        }
        return cls(name=job.name, namespace=job.namespace, uid=uid, started_at=now, roles=roles)

    def role_named(self, name: str | None) -> str:
        """Returns the name of a role of the job: the given one, or that of its only role.

        Raises:
            UnknownRole: if the job has no such role, or several and none is named.
        """
        if name in self.roles:
            return name
        if name or len(self.roles) != 1:
            raise UnknownRole(name, self.roles)
        return next(iter(self.roles))

    def view(self, name: str | None = None) -> RoleInJob:
        """Returns a role with the facts of the job.

        Args:
            name: The role; None for the only one.

        Raises:
            UnknownRole: as `role_named`.
        """
        return RoleInJob.of(self, self.roles[self.role_named(name)])

    @property
    def views(self) -> tuple[RoleInJob, ...]:
        """All roles, each with the facts of the job."""
        return tuple(self.view(name) for name in self.roles)

    def with_view(self, view: RoleInJob) -> Self:
        """Returns the job with what a decision on one role has made of it."""
        role = self.roles[view.role].replace(**view.part(RoleState))
        return self.replace(**view.part(JobFacts), roles={**self.roles, view.role: role})

    def with_role(self, role: RoleState) -> Self:
        return self.replace(roles={**self.roles, role.role: role})

    @property
    def leading(self) -> RoleInJob:
        """The role whose phase is the job's."""
        order = {phase: index for index, phase in enumerate(_LEADING_PHASES)}
        roles = self.roles
        return self.view(min(roles, key=lambda name: (roles[name].is_idle, order.get(roles[name].phase, len(order)))))

    @property
    def decisive(self) -> RoleInJob:
        """The role that has stopped the job, or else the leading one."""
        stopped = (view for view in self.views if (last := view.last_incident) is not None and last.stopped)
        return next(stopped, self.leading)

    @property
    def phase(self) -> JobPhase:
        return self.leading.phase

    @property
    def reason(self) -> str:
        """Why the job is in its phase."""
        return self.leading.reason

    @property
    def open_incident(self) -> IncidentView | None:
        """The last incident of the first role whose world does not run yet, although its nodes are requested."""
        views = (view for view in self.views if not view.suspended_alone)
        return next((incident for view in views if (incident := view.open_incident) is not None), None)

    def stop(self, outcome: Outcome) -> Self:
        """The state after the decision how the job ends."""
        roles = {name: role.replace(interruption=None) for name, role in self.roles.items()}
        return self.replace(outcome=outcome, roles=roles)
