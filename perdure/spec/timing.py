"""Every interval, timeout and grace period of Perdure, each with its reason.

They are fields of the spec (`timing:`), so that a site can tune one without a release; nothing else in the code holds a
duration that a user could want to change.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, model_validator

from .base import Section
from .durations import Duration


class LeaseTiming(Section):
    """Times after which a silent node counts as unreachable. A lapsed lease means unreachable, never failed."""

    heartbeat: Duration = timedelta(seconds=2)
    """The interval at which an agent renews its lease. Temporal Cloud bills each renewal; 10s is advised there."""
    timeout: Duration = timedelta(seconds=6)
    """A lease not renewed for this long lapses: three missed heartbeats."""
    schedule_to_start: Duration = timedelta(seconds=4)
    """The longest time that a lease may wait for its agent to take it, before the node counts as unreachable."""
    heartbeat_per_node: Duration = timedelta(milliseconds=10)
    """The heartbeat interval per node of the job, if that is longer in total: it limits a job to 100 renewals a second,
    each of them a write of Temporal's database. The time to take a lease grows in proportion. Leases of such a job
    last `outage` and two heartbeats."""
    outage: Duration = timedelta(seconds=30)
    """The time without gateway or server that the leases of a job outlast, if `heartbeat_per_node` sets its heartbeat
    (above 200 nodes): hundreds of nodes that lapse and come back together are work for both. The loss of a node is
    reported by its backend and its peers, not by its lease; a smaller job's leases lapse after `timeout`, and no node
    is replaced for that."""

    def of(self, nodes: int) -> LeaseTiming:
        """The times for a job of this many nodes: a heartbeat every 2 s up to 200 nodes, every 10 s for 1,000."""
        least = nodes * self.heartbeat_per_node
        heartbeat = max(self.heartbeat, least)
        lasts = 3 * heartbeat if least <= self.heartbeat else self.outage + 2 * heartbeat
        return self.model_copy(
            update={
                "heartbeat": heartbeat,
                "timeout": max(self.timeout, lasts),
                "schedule_to_start": max(self.schedule_to_start, 3 * least),
            }
        )

    @model_validator(mode="after")
    def _timeout_exceeds_heartbeat(self) -> LeaseTiming:
        if self.timeout < 2 * self.heartbeat:
            raise ValueError(
                "lease.timeout must be at least twice lease.heartbeat, or one late heartbeat loses the lease"
            )
        return self


class SignalTiming(Section):
    """Limits on signals, which add to histories."""

    transition_batch: Duration = timedelta(milliseconds=200)
    """The time for which a group gathers its nodes' transitions before the next message to its job; the first is sent
    at once, and so are those that a recovery waits for, up to a number."""


class RendezvousTiming(Section):
    """Times of forming a world."""

    last_call: Duration = timedelta(seconds=5)
    """The time to wait for more nodes, once `min` nodes are ready, before starting without them."""
    join_timeout: Duration = timedelta(minutes=10)
    """The time that a new job waits for its first `min` nodes before it stops with that reason. Time in a queue, or
    without a machine that has room, does not count (`limits.queue_timeout`), nor does a script's work before its
    torchrun."""
    victim_grace: Duration = timedelta(seconds=1)
    """The time to wait for the culprit's report, if every report so far says only that a peer went away."""
    settle_per_node: Duration = timedelta(milliseconds=1)
    """The time, per node of the world, to wait for more losses after nodes were lost: the machines of a rack are not
    lost in one message, and a world that is sent to a thousand nodes should not be the wrong one. A total below 0.1 s
    is skipped."""
    enter_timeout: Duration = timedelta(minutes=5)
    """The time that a node may take to enter a world that it was given (0.2 s is usual; a new node must start Python
    and torch first). After it, the node's command is started again; after the second time the node is replaced. 0: no
    limit."""


class CommandTiming(Section):
    """Times of commands to agents, which are short activities on a node's own queue."""

    schedule_to_start: Duration = timedelta(seconds=4)
    """The longest time that a command may wait for its agent to take it (70 ms is usual)."""
    schedule_to_start_per_node: Duration = timedelta(milliseconds=30)
    """The same, per node of the job, if that is longer in total: a world is sent to all of them at once (1,000 nodes
    took 20 s on a machine with two cores that also ran the server)."""
    start_to_close: Duration = timedelta(seconds=10)
    """The longest time that an agent may take to carry out a command."""

    def of(self, nodes: int) -> CommandTiming:
        """The times for a job of this many nodes."""
        longest = max(self.schedule_to_start, nodes * self.schedule_to_start_per_node)
        return self.model_copy(update={"schedule_to_start": longest})


class ProcessTiming(Section):
    """Times of stopping processes on a node, and of their logs."""

    stop_grace: Duration = timedelta(seconds=2)
    """The time from SIGTERM to SIGKILL for ranks of a generation that is over: they have nothing left to save."""
    presumed_gone: Duration = timedelta(seconds=60)
    """The time beyond `limits.termination_grace_period` for which a node's replacement, and after a request the next
    world, waits for proof that the old node has ended. It applies if nothing reports the end, and is longer than a
    cluster takes to call a machine silent (40 s is usual)."""
    orphan_grace: Duration = timedelta(0)
    """The time for which training continues after the control plane has answered that the job does not exist; 0:
    indefinitely."""
    log_max_bytes: int = Field(default=64 * 1024 * 1024, ge=4096)
    """Size in bytes at which a node's log is rotated; four rotated files are kept."""


class StallTiming(Section):
    """When a node that does not step is looked at and reported as stalled. Ranks that have stepped in their world are
    restarted where the looks agree that one of them hangs (`recovery.on_hang`); ranks that make no first step in time
    are in any case."""

    after: Duration = timedelta(minutes=2)
    """The least time without a step of any rank of the node; 0: never reported, and no hang is found. Evaluation and
    checkpoints are pauses, too."""
    steps: int = Field(default=20, ge=1)
    """The least time without a step, as a multiple of the node's usual step, for nodes with slow steps."""
    pauses: int = Field(default=2, ge=1)
    """The least time without a step, as a multiple of the longest of the node's last ten pauses that ended by
    themselves: an evaluation that comes again is no stall."""
    first_look: Duration = timedelta(seconds=15)
    """When the ranks are looked at for the first time, which finds a process that was stopped; at least five usual
    steps, and at most half of the time after which a stall is reported. It is also the least time after which a gap
    between steps is unusual, once a node knows a thousand of them."""
    elsewhere: int = Field(default=2, ge=1)
    """How many times as long as for the report of a stall a rank may be in calls of its own while the others wait for
    it: before that it may work."""
    first_step: Duration | None = None
    """The longest time from entering a world to its first step; then the ranks of all nodes are restarted. It doubles
    with each such restart in a row, and `retry.no_progress_limit` ends them. Unset: `first_steps` times the longest
    first step that the job has seen, at least `first_step_least`; a job that has seen none has no limit, since a first
    compilation may take hours, and a program without optimizer steps makes none. 0: no limit."""
    first_steps: int = Field(default=5, ge=1)
    """The learned limit of `first_step`, as a multiple of the longest first step so far."""
    first_step_least: Duration = timedelta(minutes=30)
    """The shortest learned limit of `first_step`: loading a checkpoint, or skipping the data that was read before, may
    take longer than the first start, which did neither. As long as torch's own timeout, which mostly comes first."""


class StragglerTiming(Section):
    """When something is done about a slow rank (`recovery.on_straggler`)."""

    restart_cost: Duration = timedelta(minutes=1)
    """What a restart is taken to cost, with the steps that are made again, where the job has had none to learn it from.
    Nothing is done about a slow rank before the others have waited for it for as long as that."""
    between: Duration = timedelta(minutes=10)
    """The least time from one experiment or replacement to the next."""


class Timing(Section):
    """Intervals, timeouts and grace periods. The defaults were measured; change one at a time."""

    lease: LeaseTiming = LeaseTiming()
    """Times after which a silent node counts as unreachable."""
    signals: SignalTiming = SignalTiming()
    """Limits on telemetry."""
    rendezvous: RendezvousTiming = RendezvousTiming()
    """Times of forming a world."""
    commands: CommandTiming = CommandTiming()
    """Times of commands to agents."""
    processes: ProcessTiming = ProcessTiming()
    """Times of stopping processes, and of their logs."""
    stall: StallTiming = StallTiming()
    """When a node is reported as stalled, and when its ranks are restarted because one of them hangs."""
    stragglers: StragglerTiming = StragglerTiming()
    """When something is done about a slow rank."""
    owner_check: Duration = timedelta(seconds=30)
    """The interval at which a group's watch checks that its job still runs; the group of a closed job winds down."""

    def of(self, nodes: int) -> Timing:
        """The times for a job of this many nodes."""
        return self.model_copy(update={"lease": self.lease.of(nodes), "commands": self.commands.of(nodes)})
