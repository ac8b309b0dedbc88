"""Enumerations that all parts share: phases, failure classes, sources of evidence."""

from __future__ import annotations

from perdure.contract.base import Vocabulary

__all__ = ["EvidenceSource", "FailureClass", "JobPhase", "LossCause", "NodePhase", "ProgressSource"]


class JobPhase(Vocabulary):
    """The phase of a job, for people, dashboards and the search attribute `JobPhase`."""

    STARTING = "STARTING"
    """Nodes are being created, or are not yet ready for a world."""
    WAITING = "WAITING"
    """Fewer than `min` nodes can run: the job waits for capacity."""
    RENDEZVOUS = "RENDEZVOUS"
    """The nodes have been sent a world that does not step yet."""
    RUNNING = "RUNNING"
    """Every member of the world steps, or runs where steps cannot be seen."""
    RECOVERING = "RECOVERING"
    """A failure interrupted the world; the next one is being formed."""
    SUSPENDED = "SUSPENDED"
    """No nodes, by a user's request; the job's history and budgets are kept."""
    HELD = "HELD"
    """It has failed, and its nodes are kept for inspection (`hold_on_failure`)."""
    STOPPING = "STOPPING"
    """Nodes are being wound down before the job closes."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    """A phase that only a newer release knows, which runs the job."""


class NodePhase(Vocabulary):
    """The phase of one incarnation of a node."""

    REQUESTED = "REQUESTED"
    """It was requested from the backend."""
    PENDING = "PENDING"
    """The backend has accepted it and cannot run it yet; the reason is kept."""
    CREATED = "CREATED"
    """It exists; its agent has not reported yet."""
    JOINED = "JOINED"
    """Its agent has reported; the command has not reached the rendezvous yet."""
    READY = "READY"
    """It can enter a world, or is in one."""
    LOST = "LOST"
    """Evidence shows that its processes are gone. A new incarnation may follow."""
    REMOVED = "REMOVED"
    """Removed because the job no longer needs it."""
    UNKNOWN = "UNKNOWN"
    """A phase that only a newer release knows: the node exists, and later events tell more."""


class FailureClass(Vocabulary):
    """The meaning of a failure; the policy acts on this and on nothing finer."""

    USER_CODE = "USER_CODE"
    """The script raised or exited with a code of its own: the same will probably happen again."""
    CANNOT_RUN = "CANNOT_RUN"
    """The script failed before any step of the job, by an error that running it again does not change: a module or a
    file is missing, or its code is wrong."""
    CRASH = "CRASH"
    """A rank died of SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL."""
    KILLED = "KILLED"
    """A rank was ended by SIGKILL or SIGTERM from outside."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The host's memory ran out, or what its container may use of it."""
    DEVICE_OUT_OF_MEMORY = "DEVICE_OUT_OF_MEMORY"
    """The memory of a GPU ran out."""
    HARDWARE = "HARDWARE"
    """A GPU has failed or was lost, which only a reset or a repair of its machine ends: the node is replaced."""
    STORAGE = "STORAGE"
    """A disk, a mount or an object store that the script uses is full, away, or refuses requests."""
    NETWORK = "NETWORK"
    """A server outside of the job that the script uses could not be reached, or could not answer."""
    DEVICE_FAULT = "DEVICE_FAULT"
    """A kernel failed on a GPU: an assertion in it, an access to memory that is not its own, or a fault of the GPU."""
    NUMERIC = "NUMERIC"
    """A loss was not a finite number, and the job does not continue with it."""
    CORRUPTION = "CORRUPTION"
    """A device computes wrongly without an error: a rank's gradients or parameters are not those of the others."""
    PEER_LOST = "PEER_LOST"
    """A victim: the rank failed because another one went away."""
    COLLECTIVE_TIMEOUT = "COLLECTIVE_TIMEOUT"
    """A rank waited in a collective, or for another rank's key in a store, until torch's timeout ended it: a rank that
    is alive did not come. Who reports it is not the one that hangs."""
    HANG = "HANG"
    """The ranks of a node are alive and have made no first step in the time that the job gave them."""
    RANK_HANG = "RANK_HANG"
    """A rank that has stepped hangs: independent signs agree that the others wait for it in vain."""
    STRAGGLER = "STRAGGLER"
    """A rank computes for longer than the others in each step, and they wait for it."""
    THROTTLED = "THROTTLED"
    """The same, of a rank whose GPU alone runs with reduced clocks: by heat, by power, or by its hardware."""
    LAUNCH = "LAUNCH"
    """The command could not be started: not found, not executable, or it rejected its options."""
    COMMAND_LOST = "COMMAND_LOST"
    """The command (torchrun itself) was ended although none of its ranks had failed."""
    UNPROTECTED = "UNPROTECTED"
    """A rank started on one of several nodes without Perdure's rendezvous."""
    NODE_LOST = "NODE_LOST"
    """The node's processes, pod or machine are gone."""
    DISRUPTED = "DISRUPTED"
    """The node was ended on purpose and from outside: deleted, drained, or sent SIGTERM by what evicts or
    preempts it. It counts in no budget."""
    PREEMPTED = "PREEMPTED"
    """The node made room for other work of a higher priority. It counts in no budget."""
    EVICTED = "EVICTED"
    """The node's machine ended it for lack of memory or disk, which the job may have caused."""
    NODE_UNRESPONSIVE = "NODE_UNRESPONSIVE"
    """The node answers neither its lease nor commands while its world is stopped."""
    CREATE_FAILED = "CREATE_FAILED"
    """The backend will never create the node."""
    RENDEZVOUS_TIMEOUT = "RENDEZVOUS_TIMEOUT"
    """A member did not enter a world in time."""
    UNKNOWN = "UNKNOWN"
    """A class that this release does not know: the job restarts the ranks in place."""


class LossCause(Vocabulary):
    """Why a node was lost. The cause decides whether the loss counts against its machine."""

    WANTED = "WANTED"
    """The node was removed on purpose: deleted, drained, or replaced on request."""
    PREEMPTED = "PREEMPTED"
    """It made room for other work of a higher priority."""
    EVICTED = "EVICTED"
    """Its machine lacked memory or disk, which the job may have caused."""
    JOB = "JOB"
    """The job caused it: it used more than it was allowed."""
    MACHINE = "MACHINE"
    """The machine caused it."""
    UNKNOWN = "UNKNOWN"
    """Nothing known explains it."""


class EvidenceSource(Vocabulary):
    """The reporter of a piece of evidence. Independent sources raise confidence."""

    AGENT = "AGENT"
    """The agent of a node."""
    BACKEND = "BACKEND"
    """The node's backend: the machine, the cluster, or `perdure join`."""
    LEASE = "LEASE"
    """The server: a lease lapsed."""
    COMMAND = "COMMAND"
    """A command that the node's agent did not take."""
    PEERS = "PEERS"
    """Victims: ranks that failed because a peer did."""
    USER = "USER"
    """A user's request."""
    UNKNOWN = "UNKNOWN"
    """A source that only a newer release knows."""


class ProgressSource(Vocabulary):
    """The origin of the step number, and so its reliability."""

    REPORTED = "REPORTED"
    """The script reports it through `perdure_training.report`: absolute and exact."""
    COUNTED = "COUNTED"
    """Counted optimizer steps since the process started: they prove liveness, not absolute progress."""
    UNKNOWN = "UNKNOWN"
    """Treated as COUNTED."""
