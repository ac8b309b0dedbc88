"""Views of jobs and groups: answers to queries, and the job's result."""

from __future__ import annotations

from pydantic import Field, JsonValue

from perdure.base.notebook import Shown
from perdure.contract.agents import Progress, RankStepTimes, ResourceUse
from perdure.contract.base import LogTail, Message, ShortText, Time
from perdure.contract.checkpoints import CheckpointView
from perdure.contract.datasets import UnprocessedSamples
from perdure.contract.identity import Incarnation
from perdure.contract.incidents import IncidentView
from perdure.contract.logs import LogPosition
from perdure.contract.nodes import NodeFacts
from perdure.contract.peaks import Peaks
from perdure.contract.scaling import ScalingView
from perdure.contract.vocabulary import JobPhase
from perdure.spec.durations import Duration

__all__ = [
    "AutoResources",
    "JobResult",
    "JobStatus",
    "NodeView",
    "RoleStatus",
    "SmallerRequest",
    "Unused",
]


class NodeView(Shown, NodeFacts, Incarnation):
    """A node as the query `nodes` shows it."""

    token: str = Field(default="", repr=False)
    """Empty in queries: only `adopted` carries it."""
    reachable: bool = True
    generation: int = 0
    group_rank: int | None = None
    """Its rank in the current world; None where it is not a member."""
    progress: Progress | None = None
    """The newest progress in the agent's lease, in answers of `Client.nodes`."""
    metrics: ResourceUse | None = None
    """The use of resources in the agent's latest report; set by `Client.nodes`."""
    peaks: Peaks | None = None
    """The most that it has used of its machine, in that report; set by `Client.nodes`."""
    idle: Duration | None = None
    """The time without a step of its ranks in the agent's latest report; set by `Client.nodes`."""
    usual_step: Duration | None = None
    """The usual time of a step in that report; set by `Client.nodes`."""
    step_times: tuple[RankStepTimes, ...] = ()
    """How the steps of its ranks split, in that report; set by `Client.nodes`. Empty where ranks cannot tell it: they
    have made too few steps, or see `unsplit_steps`."""
    unsplit_steps: bool = False
    """A rank cannot tell how its steps split; set by `Client.nodes`."""
    stalled_since: Time | None = None
    """When its stalled ranks made their last step."""
    avoids: tuple[str, ...] = ()
    """Suspect machines that its request avoids."""
    log_path: str = ""
    """The path of the node's log, if the backend keeps it in a file."""
    log_end: LogPosition | None = None
    """The end of its log in the agent's latest report; set by `Client.nodes`."""


class RoleStatus(Message):
    """How far one of several roles of a job is."""

    name: str
    phase: JobPhase
    """Its own; SUCCEEDED and FAILED while the job continues without it."""
    reason: str = ""
    """Why it is in this phase, in a sentence."""
    generation: int
    """Its newest world."""
    nodes: int
    """Members of that world."""
    nodes_min: int = 0
    """The fewest nodes that form a world, as scaled last."""
    nodes_max: int
    """The number of nodes that it requests."""
    nodes_allowed: int = 0
    """The most nodes that the specification or a user allows, where the job itself may choose fewer."""
    restarts: int
    """Its restarts within the restart window."""
    suspended_alone: bool = False
    """A user has suspended it without the job; it may still wait for a checkpoint before it is."""
    peaks: Peaks | None = None
    """The most that one of its nodes has used of its machine, as far as the job knows."""
    goal: dict[str, JsonValue] | None = None
    """As `JobStatus.goal`."""


class AutoResources(Message):
    """What `resources: auto` has become for a role."""

    role: str
    cpu: str
    memory: str
    shm: str | None = None
    nodes: int | None = None
    """The number of nodes; None where the specification says it, or no job does."""
    jobs: tuple[str, ...] = ()
    """Jobs of the past from which it was taken, the newest first."""
    measured: int = 0
    """The number of jobs whose use of their machines was known; 0: it is the default."""
    problem: ShortText = ""
    """Why the history could not be asked."""


class Unused(Message):
    """A part of a request that no node of a role has ever used."""

    resource: str
    """`cpu` or `memory`."""
    requested: str
    """What each node requests, as a quantity of Kubernetes."""
    used: str
    """The most that one has used: of processors the highest mean over a minute."""
    enough: str
    """What would do, with room to spare."""
    saved: str
    """What that leaves to others, for each node."""
    nodes: int
    watched: Duration
    """The time of training over which it was measured."""


class SmallerRequest(Message):
    """A resource for want of which nodes of a role have no machine, and what would do instead."""

    resource: str
    """`cpu` or `memory`."""
    requested: str
    """What each node requests, as a quantity of Kubernetes."""
    enough: str = ""
    """What would do; empty where nothing less is known to."""
    measured: bool = False
    """It is what nodes were seen to use, with room to spare, and not what `scaling.relax` allows."""
    relaxes: bool = False
    """The job requests that by itself, as `scaling.relax` allows."""
    nowhere: bool = False
    """No machine has room for that either: the job waits until one does."""
    nodes: tuple[int, ...] = ()
    """The nodes (slots) that wait."""


class JobStatus(Shown, Message):
    """Answer to the query `status`."""

    name: str
    namespace: str
    uid: str
    """The run's uid: 8 hexadecimal digits, which names of nodes and labels of pods contain."""
    phase: JobPhase
    reason: str = ""
    """Why it is in this phase, in a sentence."""
    role: str
    """The role that this is about: the requested one, else the one that the job waits for, else its first."""
    roles: tuple[str, ...] = ()
    """All roles of the job."""
    by_role: tuple[RoleStatus, ...] = ()
    """Each of its roles, if there are several."""
    backend: str
    workdir_digest: str = ""
    """The digest of the code that was uploaded with the job; empty where none was."""
    generation: int
    """The newest generation of the world."""
    nodes: int
    """Members of the current world."""
    nodes_min: int
    """The fewest nodes that form a world, as scaled last."""
    nodes_max: int
    """The number of nodes that the job requests, as scaled last."""
    world_size: int
    """Ranks of the current world."""
    restarts: int
    """Restarts within the restart window."""
    restarts_total: int = 0
    """Restarts since the job began."""
    max_restarts: int
    """The most restarts within the window: `retry.max_restarts`."""
    restart_window: Duration
    """The window: `retry.window`."""
    started_at: Time
    finished_at: Time | None = None
    notifies: tuple[str, ...] = ()
    """Whom it notifies: the names in `notifications`."""
    logs_url: str = ""
    """The destination of copies of the nodes' logs: `outputs.logs`, or a folder of the archive."""
    archive: str = ""
    """The folder in which the run is archived; empty where it is not: `outputs.archive`."""
    groups: tuple[str, ...] = ()
    """Workflow IDs of the node groups, which know each node's progress."""
    unreachable: tuple[int, ...] = ()
    """Nodes (slots) whose lease has lapsed, and that are not lost."""
    lost: tuple[int, ...] = ()
    """Nodes (slots) that are lost and not replaced yet."""
    uncreated: tuple[int, ...] = ()
    """Nodes (slots) that the backend cannot create for now, other than for lack of capacity; they are requested
    again."""
    refusal: ShortText = ""
    """Why the first of these cannot be created."""
    stalled: tuple[int, ...] = ()
    """Nodes whose ranks have stepped in this generation and are stalled."""
    suspending: bool = False
    """A user has suspended the whole job, and it makes a checkpoint before it is; a resume takes that back."""
    repairs_paused_until: Time | None = None
    """Until then hangs, slow ranks, bad numbers and wrong results are shown and not acted on; None where they are."""
    protected: bool = True
    """False once the job has found ranks that did not use Perdure's rendezvous."""
    warnings: tuple[str, ...] = ()
    """Settings that are probably not intended, each with its remedy; samples that no rank will process."""
    unprocessed: tuple[UnprocessedSamples, ...] = ()
    """Shards that were set aside after repeated failures, by dataset."""
    left: tuple[str, ...] = ()
    """What the backend's system still has of nodes that were deleted, where and why, such as a pod on a machine that
    does not answer; also once the job has ended."""
    last_incident: IncidentView | None = None
    """The newest interruption; observations do not count."""
    next_action: str = ""
    """The next thing that happens if no one requests anything."""
    checkpoint: CheckpointView = CheckpointView()
    """The newest durable checkpoint, and the step that was restored last."""
    progress: Progress | None = None
    """Progress at the last failure or finish; the groups know the current progress."""
    scaling: ScalingView | None = None
    """What is known of its speed with different numbers of nodes; None where nothing is made of it."""
    goal: dict[str, JsonValue] | None = None
    """The role's `scaling` in force, as in a specification and without defaults: the submitted one, or that of the
    newest update `scale` with one. None from workers of an older release."""
    auto: AutoResources | None = None
    """What `resources: auto` has become for the role; None where its specification says what it needs."""
    peaks: Peaks | None = None
    """The most that one of the role's nodes has used of its machine; `perdure status` adds what agents report now."""
    requests: dict[str, str] = Field(default={})
    """What each of the role's nodes requests of `cpu` and `memory`; empty where that has no meaning."""
    memory_raised: bool = False
    """That memory was raised after the memory of a node had run out: `scaling.memory_max`."""
    unused: tuple[Unused, ...] = ()
    """What they request and have never used."""
    smaller: tuple[SmallerRequest, ...] = ()
    """What nodes have no machine for, with the smaller request that would do."""

    @property
    def nodes_allowed(self) -> int:
        """The most nodes that the specification or a user allows, where the job itself may choose fewer."""
        return self.nodes_max if self.scaling is None else self.scaling.largest


class JobResult(Shown, Message):
    """The workflow's result: small and stable, for CI."""

    phase: JobPhase
    exit_code: int
    """0 ok, 1 user code failed, 3 infrastructure, 4 cancelled, 5 deadline."""
    reason: str
    """Why the job ended so, in a sentence."""
    generations: int
    """The number of worlds that the job formed."""
    restarts: int
    """Restarts that failures caused since the job began."""
    step: int | None = None
    """The last step that the script reported; None where it reports none."""
    log_tail: LogTail = ""
    """The last lines of the output of the node whose failure stopped the job, with its traceback."""
    unprocessed: tuple[UnprocessedSamples, ...] = ()
    """Shards that were set aside after repeated failures, by dataset."""
    started_at: Time
    finished_at: Time
