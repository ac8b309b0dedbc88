"""What jobs and groups show: answers to queries, and the job's result."""

from __future__ import annotations

from perdure.spec.durations import Duration
from workflows.messages.agents import Metrics, Progress, RankStarts
from workflows.messages.base import Message, ShortText, Time
from workflows.messages.logs import LogPosition
from workflows.messages.vocabulary import EvidenceSource, FailureClass, JobPhase, NodePhase


class NodeView(Message):
    """A node as the query `nodes` shows it."""

    rank: int
    incarnation: int
    phase: NodePhase
    token: str = ""
    """Empty in queries: only `adopted` carries it."""
    reachable: bool = True
    host: str = ""
    address: str = ""
    reason: str = ""
    """Of PENDING and LOST."""
    generation: int = 0
    group_rank: int | None = None
    """Its rank in the current world; None where it is not a member."""
    processes: int = 1
    progress: Progress | None = None
    metrics: Metrics | None = None
    stalled_since: Time | None = None
    """When its stalled ranks made their last step."""
    store_ports: tuple[int, ...] = ()
    command_nodes: str | None = None
    """How many nodes its command requests from torchrun, as MIN:MAX, where that is not what the job requests."""
    since: Time | None = None
    """When the phase began."""
    avoids: tuple[str, ...] = ()
    """Suspect machines that its request avoids."""
    log_path: str = ""
    """Where the backend keeps its log, where that is a path."""
    log_end: LogPosition | None = None
    """Where its log ended when its agent was heard last, in `Client.nodes`."""


class Evidence(Message):
    """One thing that was seen."""

    time: Time
    source: EvidenceSource
    rank: int | None = None
    text: ShortText


class Considered(Message):
    """An option that was not taken, and why."""

    option: str
    why_not: str


class Observation(Message):
    """A pause that passed by itself: nothing was interrupted, and nothing was done about it."""

    unreachable: tuple[int, ...] = ()
    """Nodes (slots) that could not be reached."""
    stalled: tuple[int, ...] = ()
    """Nodes (slots) whose ranks stalled."""


class IncidentView(Message):
    """One interruption, from its first sign until the world steps again, or an observation: what `perdure explain`
    prints."""

    number: int
    title: str
    failure: FailureClass | None = None
    """None for what users requested."""
    culprit: int | None = None
    """The node (slot) where it began, where that is known."""
    also_failed: tuple[int, ...] = ()
    """Other nodes (slots) that failed in the same generation by themselves."""
    started_at: Time
    """When it happened."""
    noticed_at: Time
    """When the job learned of it."""
    decided_at: Time | None = None
    commanded_at: Time | None = None
    """When the last surviving agent had the new world."""
    entered_at: Time | None = None
    """When the last member's rendezvous returned."""
    running_at: Time | None = None
    """When the last member's ranks were in the new world, where they stayed alive there without a step being seen."""
    stepping_at: Time | None = None
    """When the last member was seen to step again; None where no step was seen."""
    closed_at: Time | None = None
    """When it ended otherwise: the next one began, or what was being repaired was given up."""
    followed_by: int | None = None
    """The number of the incident that began before the new world ran."""
    starts: RankStarts | None = None
    """How the ranks of the new world were started, as far as agents say."""
    evidence: tuple[Evidence, ...] = ()
    rule: str = ""
    """The policy's rule that decided, by name."""
    action: str = ""
    waited_for: str = ""
    """Which node did not come at once, and why: the scheduler's words, say."""
    avoided: tuple[str, ...] = ()
    """Suspect machines that the new nodes are to keep away from, where others have room."""
    considered: tuple[Considered, ...] = ()
    generation_before: int = 0
    generation_after: int | None = None
    nodes_before: int = 0
    nodes_after: int | None = None
    step_before: int | None = None
    observation: Observation | None = None
    """Set where this is an observation and no interruption; it is closed from the beginning."""
    log_tail: str = ""
    left_out: str = ""
    """That texts were shortened, where they were: only the newest incidents are kept in full."""

    @property
    def over_at(self) -> Time | None:
        """When it was over, in whatever way; None while it is open."""
        return self.stepping_at or self.running_at or self.closed_at


class JobStatus(Message):
    """Query `status`."""

    name: str
    namespace: str
    uid: str
    phase: JobPhase
    reason: str = ""
    """Why it is in this phase, in a sentence."""
    role: str
    backend: str
    workdir_digest: str = ""
    """Of the code that was uploaded with the job; empty where none was."""
    generation: int
    nodes: int
    """Members of the current world."""
    nodes_min: int
    nodes_max: int
    world_size: int
    """Ranks of the current world."""
    restarts: int
    """Within the window."""
    restarts_total: int = 0
    """Since the job began."""
    max_restarts: int
    restart_window: Duration
    started_at: Time
    finished_at: Time | None = None
    logs_url: str = ""
    """Where nodes' logs are copied to: `outputs.logs`."""
    groups: tuple[str, ...] = ()
    """Workflow IDs of the node groups, which know each node's progress."""
    unreachable: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    stalled: tuple[int, ...] = ()
    """Nodes whose ranks have stepped in this generation and are stalled."""
    protected: bool = True
    """False once ranks were found that had not come through our rendezvous."""
    warnings: tuple[str, ...] = ()
    """What the job runs with and perhaps does not mean, each with its remedy."""
    last_incident: IncidentView | None = None
    next_action: str = ""
    progress: Progress | None = None
    """As of the last failure or finish; the groups know the current one."""


class JobResult(Message):
    """What the workflow returns: small and stable, for CI."""

    phase: JobPhase
    exit_code: int
    """0 ok, 1 user code failed, 3 infrastructure, 4 cancelled, 5 deadline."""
    reason: str
    generations: int
    restarts: int
    """Restarts that failures caused since the job began."""
    step: int | None = None
    started_at: Time
    finished_at: Time
