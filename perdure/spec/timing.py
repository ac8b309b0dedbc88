"""Every interval, timeout and grace of Perdure, each with its reason.

They are knobs of the spec (`timing:`), so that a site can tune one without a release; nothing else in the code
holds a duration that a user could want to change.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, model_validator

from .base import Section
from .durations import Duration


class LeaseTiming(Section):
    """How long a silent node is believed. A lapsed lease means unreachable, never failed."""

    heartbeat: Duration = timedelta(seconds=2)
    """How often an agent renews its lease. Billed per call on Temporal Cloud, where 10s is advised."""
    timeout: Duration = timedelta(seconds=6)
    """A lease not renewed for this long lapses: three missed heartbeats."""
    schedule_to_start: Duration = timedelta(seconds=4)
    """How long a lease may wait for its agent to take it, before the node counts as unreachable."""
    heartbeat_per_node: Duration = timedelta(milliseconds=10)
    """Heartbeat interval per node of the job, where that comes to more: keeps a job within 100 renewals a second, each
    of them a write of Temporal's database. The other two grow along."""

    def of(self, nodes: int) -> LeaseTiming:
        """What holds for a job of so many nodes: a heartbeat every 2 s up to 200 of them, every 10 s for 1,000."""
        least = nodes * self.heartbeat_per_node
        heartbeat = max(self.heartbeat, least)
        return self.model_copy(
            update={
                "heartbeat": heartbeat,
                "timeout": max(self.timeout, 3 * heartbeat),
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
    """What telemetry may cost. Signals make history: a group of nodes sends at most two a second."""

    heartbeat: Duration = timedelta(seconds=10)
    """The shortest interval of a node's heartbeat signal; larger groups wait longer (nodes x 0.5 s)."""
    heartbeat_per_node: Duration = timedelta(milliseconds=500)
    """Heartbeat interval per node of the group: keeps a group within two signals a second."""
    metrics_every: int = Field(default=6, ge=1)
    """Every how many heartbeats the CPU, memory and GPU figures ride along."""
    edge_batch: Duration = timedelta(milliseconds=200)
    """A group gathers its nodes' edges this long before the next message to its job; the first goes at once."""

    def interval(self, nodes: int) -> timedelta:
        """Between two heartbeat signals of a node in a group of so many."""
        return max(self.heartbeat, nodes * self.heartbeat_per_node)


class RendezvousTiming(Section):
    """How a world is formed."""

    last_call: Duration = timedelta(seconds=5)
    """Once `min` nodes are ready, how long to wait for more before starting without them."""
    join_timeout: Duration = timedelta(minutes=10)
    """How long a new job waits for its first `min` nodes before it stops with that reason; time in a queue, or without
    a machine that has room, does not count (`limits.queue_timeout`), nor does a script's work before its torchrun."""
    victim_grace: Duration = timedelta(seconds=1)
    """Where every report so far says only that a peer went away, how long to wait for the culprit's own report."""
    settle_per_node: Duration = timedelta(milliseconds=1)
    """Where nodes were lost, how long to listen for the loss of more, per node of the world: a rack's machines do not
    go in one message, and a world that is told to a thousand should not be the wrong one. What comes to less than 0.1 s
    is not waited for."""
    enter_timeout: Duration = timedelta(minutes=5)
    """How long a node may take to enter a world that it was given (0.2 s is usual; a new node must start Python and
    torch first) before its command is started again, and the next time the node is replaced; 0: no limit."""


class CommandTiming(Section):
    """Commands are short activities on a node's own queue."""

    schedule_to_start: Duration = timedelta(seconds=4)
    """How long a command may wait for its agent to take it (70 ms is usual)."""
    schedule_to_start_per_node: Duration = timedelta(milliseconds=30)
    """The same, per node of the job, where that comes to more: a world is told to all of them at once (1,000 nodes took
    20 s on a machine of two cores that also was the server)."""
    start_to_close: Duration = timedelta(seconds=10)
    """How long an agent may take to carry a command out."""

    def of(self, nodes: int) -> CommandTiming:
        """What holds for a job of so many nodes."""
        longest = max(self.schedule_to_start, nodes * self.schedule_to_start_per_node)
        return self.model_copy(update={"schedule_to_start": longest})


class ProcessTiming(Section):
    """How processes are stopped on a node."""

    stop_grace: Duration = timedelta(seconds=2)
    """From SIGTERM to SIGKILL for ranks of a generation that is over: they have nothing left to save."""
    presumed_gone: Duration = timedelta(seconds=60)
    """How long after `limits.termination_grace_period` a node's replacement, and after a request the next world,
    waits for proof that the old node has ended, where nothing reports it: longer than a cluster takes to call a machine
    silent (40 s is usual)."""
    orphan_grace: Duration = timedelta(0)
    """How long training continues when the control plane answers that the job does not exist; 0: indefinitely."""
    log_max_bytes: int = Field(default=64 * 1024 * 1024, ge=4096)
    """Size in bytes at which a node's log is rotated; four rotated files are kept."""


class StallTiming(Section):
    """When a node that has stepped and no longer does is reported as stalled. Nothing is restarted for it."""

    after: Duration = timedelta(minutes=2)
    """How long no rank of the node makes a step, at least; 0 is never. Evaluation and checkpoints are pauses, too."""
    steps: int = Field(default=20, ge=1)
    """At least as long as this many of the node's usual steps, where they are slow."""


class Timing(Section):
    """Intervals, timeouts and graces. The defaults were measured; change one at a time."""

    lease: LeaseTiming = LeaseTiming()
    """How long a silent node is believed."""
    signals: SignalTiming = SignalTiming()
    """What telemetry may cost."""
    rendezvous: RendezvousTiming = RendezvousTiming()
    """How a world is formed."""
    commands: CommandTiming = CommandTiming()
    """Commands to nodes."""
    processes: ProcessTiming = ProcessTiming()
    """How processes are stopped and their logs kept."""
    stall: StallTiming = StallTiming()
    """When a node is reported as stalled."""
    owner_check: Duration = timedelta(seconds=30)
    """How often a group's watch asks whether its job still runs; a closed job means wind down."""

    def of(self, nodes: int) -> Timing:
        """What holds for a job of so many nodes."""
        return self.model_copy(update={"lease": self.lease.of(nodes), "commands": self.commands.of(nodes)})
