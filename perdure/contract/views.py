"""Views of jobs and groups: answers to queries, and the job's result."""

from __future__ import annotations

from pydantic import Field

from perdure.base.notebook import Shown
from perdure.contract.actions import Actions
from perdure.contract.agents import Progress, RankStarts, RankStepTimes, ResourceUse
from perdure.contract.base import LogTail, Message, ShortText, Time, Vocabulary
from perdure.contract.checkpoints import CheckpointView, RestoreSource
from perdure.contract.datasets import UnprocessedSamples
from perdure.contract.hangs import Hang
from perdure.contract.identity import Incarnation
from perdure.contract.logs import LogPosition
from perdure.contract.nodes import NodeFacts
from perdure.contract.peaks import Peaks
from perdure.contract.vocabulary import EvidenceSource, FailureClass, JobPhase
from perdure.spec.durations import Duration

__all__ = [
    "AutoResources",
    "Considered",
    "Evidence",
    "IncidentView",
    "JobResult",
    "JobStatus",
    "NodeView",
    "Observation",
    "Pace",
    "Resized",
    "RoleStatus",
    "ScalingView",
    "SlowCause",
    "Slowness",
    "Straggler",
    "Suggestion",
    "Suspect",
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


class Evidence(Message):
    """One observed fact that a decision rests on."""

    time: Time
    """When it happened."""
    source: EvidenceSource
    rank: int | None = None
    """The node (slot) that it is about, where that is known."""
    text: ShortText
    """A description for people."""


class Considered(Message):
    """An option that was not taken, and why."""

    option: str
    """What the job could have done."""
    why_not: str
    """Why it did not."""


class Straggler(Message):
    """A rank for which all others wait, step after step."""

    node: int = 0
    """The node (slot)."""
    rank: int
    """The global rank."""
    host: str = ""
    """Its machine, where that is known."""
    compute: float
    """Seconds of a step in which it computes."""
    usual: float
    """Seconds of a step in which the others do, as a median."""
    lost: float
    """The share of each step that the others wait for it."""
    slowed: ShortText = ""
    """Why the clocks of its GPU are reduced, and not those of most others: `thermal`, `hardware` or `power`."""


class SlowCause(Vocabulary):
    """What an experiment has shown about a slow rank."""

    MACHINE = "MACHINE"
    """Its node is slow at another place, too."""
    PLACE = "PLACE"
    """The rank is slow on another node, too: it has more work than the others."""
    NEITHER = "NEITHER"
    """No rank is slow since."""
    UNKNOWN = "UNKNOWN"
    """It has shown nothing."""


class Slowness(Message):
    """What is known of a slow rank that the job acted on, and what that gained."""

    rank: Straggler
    """The rank as it was found."""
    step_before: float
    """Seconds of a step, as a median over the ranks."""
    step_after: float | None = None
    """The same in the world that followed, once it is known."""
    cause: SlowCause | None = None
    """The verdict of the experiment; None where there is none yet."""
    machine_ratio: float | None = None
    """How many times as long as the others its node computes at the other place."""
    place_ratio: float | None = None
    """How many times as long as the others the node computes that has its place."""
    measurements: int = 0
    """Measurements of the experiment."""
    p_value: float | None = None
    """The probability that another cause would have led to this verdict, at most."""


class Observation(Message):
    """An event that interrupted nothing: a pause that ended by itself, a storage or a backend that refuses requests."""

    unreachable: tuple[int, ...] = ()
    """Nodes (slots) that could not be reached."""
    stalled: tuple[int, ...] = ()
    """Nodes (slots) whose ranks stalled."""
    storage: bool = False
    """Checkpoints could not be stored. Its entry is written when that begins, and its title changed when it is over."""
    uncreated: tuple[int, ...] = ()
    """Nodes (slots) that the backend could not create. Its entry is open until they are created."""
    started_over: bool = False
    """No checkpoint in the storage could be loaded, and the script started over."""
    bad_number: bool = False
    """A rank reported a number that is not finite, and the training continued."""
    unrepaired: bool = False
    """A loss that is not a number, or a wrong result, was left as it was: a user had paused repairs."""
    not_deterministic: bool = False
    """The script's step differs with itself, so that replays say nothing about devices."""
    stragglers: tuple[Straggler, ...] = ()
    """Ranks for which all others wait, as they were found."""
    failed_check: bool = False
    """The machine of a node failed a check before the node was taken into a world."""
    refused: bool = False
    """That node was not taken in."""
    suspected: bool = False
    """That node trains: its machine was checked after a failure that may be the machine's own."""
    missed_nodes: bool = False
    """Nodes that the job requested to train with more of them did not come, and were given up for now."""
    missed_goal: bool = False
    """No number of nodes reaches the goal of `scaling.policy`."""
    shared: bool = False
    """The sharing of the cluster has given nodes to the job, or taken some."""


class Suspect(Message):
    """A node that may have begun an interruption that no node has reported as its own: a suspicion, not a finding."""

    rank: int
    """The node (slot)."""
    ranks: tuple[int, ...] = ()
    """Its global ranks that reported no timeout of their own while others waited for them."""
    stalled_first: bool = False
    """It stopped stepping before the others, by the reports of the agents: an independent sign."""


class IncidentView(Shown, Message):
    """One interruption, from its first evidence until the world steps again, or an observation. `perdure explain`
    prints these."""

    number: int
    """Counts the job's incidents and observations, from 1."""
    role: str = ""
    """The role whose nodes it names."""
    title: str
    """What happened, in one clause."""
    failure: FailureClass | None = None
    """None for what users requested."""
    culprit: int | None = None
    """The node (slot) where it began, where that is known."""
    host: str = ""
    """The machine of that node, where it is known."""
    also_failed: tuple[int, ...] = ()
    """Other nodes (slots) that failed in the same generation by themselves."""
    suspects: tuple[Suspect, ...] = ()
    """Nodes that may have begun it, where no node is known to have."""
    hang: Hang | None = None
    """The ranks that hang, where that was found."""
    slowness: Slowness | None = None
    """The slow rank, where the job did something about one."""
    started_at: Time
    """When it happened."""
    noticed_at: Time
    """When the job learned of it."""
    decided_at: Time | None = None
    """When the job first decided on it."""
    commanded_at: Time | None = None
    """When the last surviving agent had received the new world."""
    entered_at: Time | None = None
    """When the last member's rendezvous returned."""
    running_at: Time | None = None
    """When the last member's ranks were in the new world, where they stayed alive there without a step being seen."""
    stepping_at: Time | None = None
    """When the last member was seen to step again; None where no step was seen."""
    closed_at: Time | None = None
    """When it ended otherwise: the next incident began, or the job abandoned the repair."""
    followed_by: int | None = None
    """The number of the incident that began before the new world ran."""
    starts: RankStarts | None = None
    """Warm and cold starts of the new world's ranks, as far as agents report them."""
    evidence: tuple[Evidence, ...] = ()
    """What was observed, in the order in which the job learned of it."""
    rule: str = ""
    """The policy's rule that decided, by name."""
    action: str = ""
    """What the job did, in words."""
    actions: Actions = ()
    """The same as data, with `kind` and nodes. Empty where the incident ended before a decision, and in an older one
    whose texts were shortened."""
    stopped: bool = False
    """The job decided to stop because of it."""
    waited_for: str = ""
    """The node that was not available at once, and the reason, such as the scheduler's message."""
    avoided: tuple[str, ...] = ()
    """Suspect machines that the new nodes should avoid where other machines have room."""
    considered: tuple[Considered, ...] = ()
    """The options that were not taken."""
    generation_before: int = 0
    """The generation that was interrupted."""
    generation_after: int | None = None
    """The next generation, once it was sent out."""
    nodes_before: int = 0
    """Nodes of the interrupted world."""
    nodes_after: int | None = None
    """Nodes of the next world."""
    step_before: int | None = None
    """The last known step before the interruption."""
    restored_step: int | None = None
    """The step with which the new world continued, where a checkpointer loaded one."""
    restored_from: RestoreSource | None = None
    """Where that step was found."""
    steps_again: int | None = None
    """The number of steps that the new world makes again; None where that is unknown."""
    observation: Observation | None = None
    """Set where this is an observation and not an interruption. An observation is closed from the beginning, except
    for that of nodes that cannot be created."""
    own_lines: tuple[str, ...] = ()
    """Lines that the culprit's node has printed in the minute before it failed, and that no other node which reported
    has printed, apart from numbers: the newest three."""
    log_tail: str = ""
    """The last lines of the output of a node that failed."""
    left_out: str = ""
    """A note that texts were shortened, if they were: a job keeps only the newest incidents in full."""

    @property
    def over_at(self) -> Time | None:
        """The end of the incident, whichever way it ended; None while it is open."""
        return self.stepping_at or self.running_at or self.closed_at


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


class Pace(Message):
    """How fast the steps of a world were."""

    nodes: int
    step: float
    """Seconds of a usual step."""
    spread: float = 0
    """Half the distance between the quartiles of its measurements, in seconds."""
    generation: int


class Resized(Message):
    """A number of nodes that a job has chosen by itself."""

    time: Time
    before: int
    after: int
    is_try: bool
    """It was chosen to measure the speed; otherwise because of what was measured."""
    expected_step: float | None = None
    """Seconds of a step that were expected with it; None where nothing was."""
    gave_up: bool = False
    """Nodes that it had requested did not come."""


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


class Suggestion(Message):
    """A number of nodes that the sharing of its cluster has advised a job to have."""

    nodes: int
    why: ShortText
    time: Time


class ScalingView(Message):
    """What a job knows of its speed with different numbers of nodes, and what it makes of that."""

    fewest: int
    largest: int
    unit: int = 1
    global_batch: bool = False
    """Steps have a fixed number of samples; otherwise their number grows with that of the nodes."""
    min_efficiency: float
    """`scaling.min_efficiency`."""
    paces: tuple[Pace, ...] = ()
    """The newest measurement with each number of nodes, by that number."""
    chosen: int | None = None
    """The number of nodes that the measurements speak for; None while there are too few."""
    why: str = ""
    """What the job waits for, or why it keeps its number, in a sentence."""
    policy: str = "efficient"
    """`scaling.policy`."""
    problem: str = ""
    """Why no number of nodes reaches the goal of `policy`, and what would; empty where one does."""
    meets: tuple[int, ...] = ()
    """The numbers of nodes that reach it, as far as that is known."""
    price: float | None = None
    """`scaling.price`."""
    steps_left: int | None = None
    """Steps that are left, as the present world counts them."""
    pauses: float = 1.0
    """The time that steps take together with all pauses, in times of the steps alone."""
    resized: tuple[Resized, ...] = ()
    """The newest changes that the job has made by itself, the oldest first."""
    shares: bool = False
    """`scaling.share`."""
    advised: Suggestion | None = None
    """The newest advice that it has followed; None where there was none since a user scaled it."""


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
    repairs_paused_until: Time | None = None
    """Until then hangs, slow ranks, bad numbers and wrong results are shown and not acted on; None where they are."""
    protected: bool = True
    """False once the job has found ranks that did not use Perdure's rendezvous."""
    warnings: tuple[str, ...] = ()
    """Settings that are probably not intended, each with its remedy; samples that no rank will process."""
    unprocessed: tuple[UnprocessedSamples, ...] = ()
    """Shards that were set aside after repeated failures, by dataset."""
    last_incident: IncidentView | None = None
    """The newest interruption; observations do not count."""
    next_action: str = ""
    """The next thing that happens if no one requests anything."""
    checkpoint: CheckpointView = CheckpointView()
    """The newest durable checkpoint, and the step that was restored last."""
    progress: Progress | None = None
    """Progress at the last failure or finish; the groups know the current progress."""
    scaling: ScalingView | None = None
    """What is known of its speed with different numbers of nodes; None where it is not measured."""
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
