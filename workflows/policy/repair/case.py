"""A case: everything that a rung of the ladder reads, and the verdict that it may return."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from perdure.contract import Action, FailureClass, ReplaceNodes, RestartCommands, Stop, Suspect, Wait
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.job import JobSpec
from perdure.spec.recovery import CapacityLoss
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES, NODE_FAILURES, FailureTraits, precedence
from perdure.workflows.policy.diagnosis.suspicion import suspects_of
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState
from perdure.workflows.policy.state.role import Interruption


@dataclass(frozen=True)
class Rejected:
    """An action that the job did not take, and why."""

    action: Action
    why_not: str


@dataclass(frozen=True)
class Verdict:
    """The decision on an interruption: what is done about it comes from its actions alone."""

    rule: str
    title: str
    actions: tuple[Action, ...]
    failure: FailureClass | None = None
    culprit: int | None = None
    suspects: tuple[Suspect, ...] = ()
    rejected: tuple[Rejected, ...] = field(default=())
    waits: str = ""
    """What follows a `Wait`, and when, for users; empty for one that is over in a moment."""

    @property
    def stop(self) -> Stop | None:
        """The end of the job, if the verdict is that."""
        return next((action for action in self.actions if isinstance(action, Stop)), None)

    @property
    def wait(self) -> Wait | None:
        """The wait for more reports, if it is too early for a decision."""
        return next((action for action in self.actions if isinstance(action, Wait)), None)

    @property
    def replaced(self) -> frozenset[int]:
        """The nodes (slots) that it gives up."""
        return frozenset(rank for action in self.actions if isinstance(action, ReplaceNodes) for rank in action.nodes)


@dataclass(frozen=True)
class Case:
    """An interruption of a job that is to be decided on."""

    state: RoleInJob
    interruption: Interruption
    job: JobSpec
    now: datetime
    blamed: NodeFailure | None = None
    """The failure that a rule of the job is for; None: the first cause explains the others."""

    @cached_property
    def causes(self) -> tuple[NodeFailure, ...]:
        """The failures in the order of their classes, causes before their effects."""
        order = sorted(
            self.interruption.failures,
            key=lambda failure: (
                precedence(failure.failure),
                not failure.certain,
                # Clocks of machines differ, and steps do not.
                failure.number.step if failure.number is not None else 0,
                failure.time,
            ),
        )
        return tuple(order)

    @property
    def culprit(self) -> NodeFailure:
        """The failure that explains the others."""
        return self.blamed or self.causes[0]

    @property
    def traits(self) -> FailureTraits:
        """The meaning of the culprit's failure."""
        return FAILURE_CLASSES[self.culprit.failure]

    @cached_property
    def missed(self) -> frozenset[int]:
        """Nodes whose command did not enter the world."""
        late = self.interruption.ranks_with(FailureClass.RENDEZVOUS_TIMEOUT)
        return frozenset(rank for rank in late if self.state.is_late(self.state.nodes[rank]))

    @cached_property
    def gone(self) -> tuple[int, ...]:
        """Nodes that are gone, unresponsive, or did not enter their world although their command was restarted for
        it."""
        again = {rank for rank in self.missed if memory.times(self.state, RestartCommands, self.state.nodes[rank])}
        return tuple(sorted(self.interruption.ranks_with(*NODE_FAILURES) | again))

    @cached_property
    def survivors(self) -> tuple[NodeState, ...]:
        """Members of the world that are alive and not given up."""
        return tuple(node for node in self.state.members if node.alive and node.rank not in self.gone)

    @cached_property
    def suspects(self) -> tuple[Suspect, ...]:
        """Nodes that probably hang, where the reports single out any."""
        return suspects_of(self.state, self.interruption)

    @property
    def may_replace(self) -> bool:
        """Whether a node may be replaced that is not known to be lost."""
        return self._creates_nodes and self.job.recovery.on_capacity_loss is not CapacityLoss.FAIL

    @property
    def _creates_nodes(self) -> bool:
        return CAPABILITIES[self.job.backend].creates_nodes

    def replace(
        self, nodes: tuple[int, ...], *, suspected: bool = False, elsewhere: bool = False, between_worlds: bool = False
    ) -> ReplaceNodes:
        """The replacement of nodes by the job's backend."""
        return ReplaceNodes(
            nodes=nodes,
            suspected=suspected,
            elsewhere=elsewhere and CAPABILITIES[self.job.backend].chooses_machines,
            between_worlds=between_worlds,
            creates_nodes=self._creates_nodes,
        )

    def blame(self, rule: str, *actions: Action, rejected: tuple[Rejected, ...], title: str = "") -> Verdict:
        """The verdict about a failure that one node began; its title is that node's failure, unless another is
        given."""
        return Verdict(
            rule=rule,
            title=title or f"node {self.culprit.rank}: {self.culprit.text}",
            actions=actions,
            failure=self.culprit.failure,
            culprit=self.culprit.rank,
            rejected=rejected,
        )
