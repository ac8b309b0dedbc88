"""Incidents: what interrupted a job, what the job knew and did, and what it only observed."""

from __future__ import annotations

from perdure.base.notebook import Shown
from perdure.contract.actions import Actions
from perdure.contract.agents import RankStarts
from perdure.contract.base import Message, ShortText, Time, Vocabulary
from perdure.contract.checkpoints import RestoreSource
from perdure.contract.hangs import Hang
from perdure.contract.vocabulary import EvidenceSource, FailureClass

__all__ = [
    "Considered",
    "Evidence",
    "IncidentView",
    "Observation",
    "SlowCause",
    "Slowness",
    "Straggler",
    "Suspect",
]


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
    awaits_state: bool = False
    """Ranks waited for a newer state than they could load. Its entry is open until they continue."""
    lost_state: bool = False
    """Ranks continued with an older state than one that is known to have existed, or began without any."""
    refused_change: bool = False
    """A world of another size was not formed, since it could not load the state."""
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
    smaller_requests: bool = False
    """No machine had room for what nodes requested, and new ones request less."""
    new_goal: bool = False
    """A user has changed `scaling`: another policy, goal or limit."""


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
