"""What a job knows of one node: of its newest incarnation, and of those that went before it."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from perdure.contract import (
    Check,
    Evidence,
    EvidenceSource,
    FailureClass,
    FoundCorruption,
    Incarnation,
    LossCause,
    Message,
    NodeFacts,
    NodePhase,
    RankNumber,
    RankStepTimes,
    RuleMatch,
    SnapshotUse,
    StallLook,
)
from perdure.contract.base import LogTail, ShortText


class RanOut(Message):
    """What a node had whose memory ran out."""

    requested: int | None = None
    """Bytes that it had requested; None for `resources.memory` of the specification."""
    limit: int | None = None
    """Bytes that its memory controller allowed, where that is known."""


class NodeFailure(Message):
    """The failure of one node that broke a generation, as the job has judged it."""

    rank: int
    failure: FailureClass
    time: datetime
    """When it happened."""
    source: EvidenceSource = EvidenceSource.AGENT
    """The reporter."""
    exit_code: int | None = None
    signal: int | None = None
    """The signal that ended the rank, or the command."""
    text: ShortText
    """A description for people."""
    raised_at: str = ""
    """The type of the script's exception and the line that raised it: see
    `perdure.workflows.policy.diagnosis.raised_errors`."""
    matches: tuple[RuleMatch, ...] = ()
    """The rules of the job whose `match.log` fits the node's output."""
    log_tail: LogTail = ""
    certain: bool = True
    """False where only an exit code is known, or a loss that another rank may have spoiled: the node may be a victim
    that did not report why it failed."""
    as_of_timeout: bool = False
    """Its command, or one of its ranks, has ended with the exit code of a `timeout` whose time is over."""
    ranks: tuple[int, ...] = ()
    """The global ranks that failed, as far as they are known."""
    ran_out: RanOut | None = None
    """Set where the host's memory ran out, or what the node's container may use of it."""
    number: RankNumber | None = None
    """The loss for which the world ends, if it is that."""
    corruption: FoundCorruption | None = None
    """The wrong result for which the world ends, if it is that."""

    @classmethod
    def unresponsive(
        cls, rank: int, text: str, time: datetime, *, source: EvidenceSource = EvidenceSource.LEASE
    ) -> NodeFailure:
        """Returns the failure of a node that does not answer."""
        return cls(rank=rank, failure=FailureClass.NODE_UNRESPONSIVE, time=time, source=source, text=text)

    @property
    def evidence(self) -> Evidence:
        """The failure as an incident shows it."""
        return Evidence(time=self.time, source=self.source, rank=self.rank, text=self.text)


_GONE = (NodePhase.LOST, NodePhase.REMOVED)


class NodeState(NodeFacts, Incarnation):
    """The newest incarnation of one node. Its `store_ports` are those that no generation of this job has used."""

    token: str = Field(repr=False)
    loss_cause: LossCause = LossCause.WANTED
    """Why a LOST node was lost."""
    avoids: tuple[str, ...] = ()
    """Machines that its request avoids."""
    cpu: str | None = None
    """Processors that it requests, as a quantity; None for `resources.cpu` of the specification."""
    memory: int | None = None
    """Bytes of memory that it requests; None for `resources.memory` of the specification."""
    queued: bool = False
    """Pending without a machine: its queue has not admitted it, or no machine has room."""
    reachable: bool = True
    silent_since: datetime | None = None
    """When it last became unreachable."""
    polls_refused_until: datetime | None = None
    """Until then its agent's last report counts that the Temporal server refuses its polls; None where it has reported
    none."""
    used_ports: tuple[int, ...] = ()
    """Ports that generations have used, which late reports may still list."""
    commanded: int = 0
    """The newest generation that its agent has accepted."""
    entered: int = 0
    """The newest generation that it is known to have entered."""
    stepping: int = 0
    """The newest generation that it runs in: its ranks have stepped there, or stayed alive for a while."""
    stepped: int = 0
    """The newest generation that it was seen to step in."""
    without_checkpoints: int = 0
    """The newest generation in which its ranks stepped and had not begun to save into the job's storage."""
    snapshots: SnapshotUse | None = None
    """How its ranks keep their state in memory, as far as they have said it."""
    snapshots_in: int = 0
    """The newest generation in which they have."""
    finished: int = 0
    """The newest generation that all its ranks finished."""
    stage: int = 0
    """The number of torchruns of its command that had ended with 0 when it last requested a world."""
    requested_world: bool = False
    """Its command has requested a world."""
    left: str = ""
    """What its backend's system still has of it after its deletion, where and why; empty for nothing."""
    ended: bool = False
    """Its command has ended with 0."""
    failed: NodeFailure | None = None
    """The failure of its command after its ranks had finished and others had not: handled when the world is
    complete."""
    catching_up: bool = False
    """Its command started over after a stage was complete, and has not skipped all complete stages yet."""
    preparing: bool = False
    """Its command runs, and has not started its torchrun yet."""
    waits: str = ""
    """What its command waits for before it starts."""
    command_restarts: int = 0
    """The number of restarts of its command between two worlds that were requested."""
    released: bool = False
    """It is being ended from outside, and need not wait for a checkpoint any longer."""
    stalled_in: int = 0
    """The generation in which its ranks are stalled; 0 for none."""
    stalled_since: datetime | None = None
    """When the stalled ranks made their last step, or entered their world if they have made none in it."""
    stalled_at_start: bool = False
    """The stalled ranks have made no step in their world."""
    step_times: tuple[RankStepTimes, ...] = ()
    """How the steps of its ranks split, in the latest report."""
    step_times_in: int = 0
    """The generation of that report."""
    look: StallLook | None = None
    """Where its stalled ranks are."""
    unchecked: bool = False
    """Its machine is to be checked before a world includes it."""
    check_runs: int = 0
    """The number of runs of these checks that the job has requested; 0 where the first one is enough."""
    checked_runs: int = 0
    """The number of runs that it has reported."""
    checked_at: datetime | None = None
    """When the last of them arrived."""
    checks: tuple[Check, ...] = ()
    """What they have found, until the job has decided on it."""
    suspicion: ShortText = ""
    """The failure for which its machine is being checked although the node is in a world."""
    failed_check: ShortText = ""
    """The check that the machine failed then; empty where it has passed all."""
    figures: dict[str, float] = Field(default={})
    """What other machines are compared with: the figures of a node that was taken in."""
    memory_awaited_until: datetime | None = None
    """It runs and is to have `memory`: until when it is waited for; None where it has it."""
    memory_refused: ShortText = ""
    """Why it does not get that where it runs, until the job has decided on it."""
    refusals: int = 0
    """Incarnations of this rank in a row that were not taken in because of their machines."""
    cut_off: bool = False
    """It waits for a world, and cannot connect to the current one; `reason` names the address."""
    failed_starts: int = 0
    """Incarnations of this rank in a row that were lost before they were ready."""
    not_before: datetime | None = None
    """No replacement is requested before this time."""
    uncreated_since: datetime | None = None
    """Since when its backend has refused to create it, other than for lack of capacity; older incarnations count."""
    ranks_ended: bool = False
    """Its agent has reported that its processes have ended, because something outside ends the node."""
    left_world: bool = False
    """It was a member of a world, and the next world does not include it, whether or not its agent had accepted that
    world."""
    may_still_run: bool = False
    """It was given up while in a world, and nothing proves that its processes have ended."""
    predecessor: int = 0
    """The older incarnation whose processes may still run; 0 for none. Until they have ended it enters no world."""
    predecessor_until: datetime | None = None
    """When the predecessor is presumed gone without proof."""
    sequences: tuple[int, ...] = ()
    """Sequence numbers of its last messages to the job: exact repeats are dropped, late ones are not."""

    @property
    def alive(self) -> bool:
        """No evidence shows that it is gone."""
        return self.phase not in _GONE


class SlotOwner(Message):
    """The process of `perdure join` that owns a slot, on a backend that only keeps slots open."""

    node_id: str
    session: str
    stay: int
    host: str
    started_at: datetime
    boot: str = ""
    uptime: float = 0.0
    """This and `boot` are as in `JoinRequest`."""
    since: datetime
    """When it took the slot."""
    incarnation: int
    """The incarnation that it was given, or will be given once there is one."""
    displaced: tuple[str, ...] = ()
    """Sessions that joined under the same node ID before and are over."""
    ticket: str = ""
    """The ID of the ticket with which it joined through the gateway; empty if it reached Temporal itself."""


class MachineLoss(Message):
    """The loss of a node on a machine, other than a removal on purpose."""

    host: str
    time: datetime
    cause: LossCause


class LeavingNode(Incarnation):
    """An incarnation that was given up on request, and whose ranks may still save a checkpoint."""

    until: datetime
    """When it is presumed gone without proof."""
