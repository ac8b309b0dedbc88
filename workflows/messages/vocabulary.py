"""The vocabulary that all parts share: phases, what failures mean, who reports them."""

from __future__ import annotations

from workflows.messages.base import Vocabulary


class JobPhase(Vocabulary):
    """Where a job stands, for people, dashboards and the search attribute `JobPhase`."""

    STARTING = "STARTING"
    """Nodes are being created, or are not yet ready for a world."""
    WAITING = "WAITING"
    """Fewer than `min` nodes can run: the job waits for capacity."""
    RENDEZVOUS = "RENDEZVOUS"
    """A world was handed out and does not step yet."""
    RUNNING = "RUNNING"
    """Every member of the world steps, or runs where steps cannot be seen."""
    RECOVERING = "RECOVERING"
    """A failure interrupted the world; the next one is being formed."""
    SUSPENDED = "SUSPENDED"
    """No nodes, by a user's request; the job's history and budgets are kept."""
    HELD = "HELD"
    """It has failed, and its nodes are kept for looking at (`hold_on_failure`)."""
    STOPPING = "STOPPING"
    """Nodes are being wound down before the job closes."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    """A newer release's phase: the job is of that release."""


class NodePhase(Vocabulary):
    """Where one incarnation of a node stands."""

    REQUESTED = "REQUESTED"
    """It was requested from the backend."""
    PENDING = "PENDING"
    """The backend has accepted it and cannot run it yet; the reason is kept."""
    CREATED = "CREATED"
    """It exists; its agent has not spoken."""
    JOINED = "JOINED"
    """Its agent has spoken; the command is on its way to the rendezvous."""
    READY = "READY"
    """It can enter a world, or is in one."""
    LOST = "LOST"
    """Its processes are gone, by evidence. A new incarnation may follow."""
    REMOVED = "REMOVED"
    """Taken away because the job no longer wants it."""
    UNKNOWN = "UNKNOWN"
    """A newer release's phase: the node is there, and what follows says more."""


class FailureClass(Vocabulary):
    """What a failure means; the policy acts on this and on nothing finer."""

    USER_CODE = "USER_CODE"
    """The script raised or exited with a code of its own: the same will probably happen again."""
    CRASH = "CRASH"
    """A rank died of SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL."""
    KILLED = "KILLED"
    """A rank was ended by SIGKILL or SIGTERM from outside."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """Host or device memory ran out."""
    PEER_LOST = "PEER_LOST"
    """A victim: the rank failed because another one went away."""
    LAUNCH = "LAUNCH"
    """The command could not be started: not found, not executable, refused options."""
    COMMAND_LOST = "COMMAND_LOST"
    """The command (torchrun itself) was ended, and none of its ranks had failed."""
    UNPROTECTED = "UNPROTECTED"
    """A rank appeared on one of several nodes without having gone through our rendezvous."""
    NODE_LOST = "NODE_LOST"
    """The node's processes, pod or machine are gone."""
    NODE_UNRESPONSIVE = "NODE_UNRESPONSIVE"
    """The node answers neither its lease nor commands while its world is stopped."""
    CREATE_FAILED = "CREATE_FAILED"
    """The backend refused the node for good."""
    RENDEZVOUS_TIMEOUT = "RENDEZVOUS_TIMEOUT"
    """A member did not enter a world in time."""
    UNKNOWN = "UNKNOWN"
    """What failed has no name in this release: the ranks are restarted in place."""


class LossCause(Vocabulary):
    """Whose doing the loss of a node was, as far as its machine is concerned."""

    WANTED = "WANTED"
    """It was removed on purpose: deleted, drained, preempted, or replaced on request."""
    JOB = "JOB"
    """The job's own: it took more than it was allowed."""
    MACHINE = "MACHINE"
    """Its machine's."""
    UNKNOWN = "UNKNOWN"
    """Nothing is known that explains it."""


class EvidenceSource(Vocabulary):
    """Who reports a piece of evidence. Independent sources raise confidence."""

    AGENT = "AGENT"
    BACKEND = "BACKEND"
    LEASE = "LEASE"
    COMMAND = "COMMAND"
    PEERS = "PEERS"
    USER = "USER"
    UNKNOWN = "UNKNOWN"


class ProgressSource(Vocabulary):
    """How far the step number can be trusted."""

    REPORTED = "REPORTED"
    """The script says it through `perdure.training.report`: absolute and exact."""
    COUNTED = "COUNTED"
    """Optimizer steps since the process started: says alive, not how far."""
    UNKNOWN = "UNKNOWN"
    """Counts as COUNTED does."""
