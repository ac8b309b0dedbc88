"""Formats numbers, times and states for a terminal; pure functions, used by every view."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rich.markup import escape

from perdure.base.words import count

if TYPE_CHECKING:
    from perdure.contract import (
        CheckpointView,
        IncidentView,
        JobStatus,
        NodeView,
        Peaks,
        Progress,
        RoleStatus,
        SmallerRequest,
        Unused,
    )

_NAMED_NODES = 4

PHASE_STYLES = {
    "RUNNING": "green",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "HELD": "bold red",
    "CANCELLED": "yellow",
    "SUSPENDED": "yellow",
    "RECOVERING": "bold yellow",
    "WAITING": "yellow",
}


def duration(value: timedelta | float) -> str:
    """Formats a duration as briefly as is useful: 0.42 s, 7.3 s, 2m 10s, 1d 22h."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count)


def clock(time: datetime | None, *, fraction: bool = False) -> str:
    """The time of day in the reader's time zone."""
    if time is None:
        return "--:--:--"
    local = time.astimezone()
    return f"{local:%H:%M:%S}" + (f".{local.microsecond // 100_000}" if fraction else "")


def age(time: datetime, now: datetime | None = None) -> str:
    return duration(max(timedelta(), (now or datetime.now(UTC)) - time))


def idle(node: NodeView) -> str:
    """`no step for 1m 11s (usual 0.10 s)`."""
    usual = f" (usual {duration(node.usual_step)})" if node.usual_step else ""
    return f"no step for {duration(node.idle or timedelta())}{usual}"


def stall(status: JobStatus, nodes: Sequence[NodeView]) -> str:
    """`no step on node 1 for 3m 10s`, or `no step for 1m 11s (usual 0.10 s)` before a stall is reported; empty where
    all nodes step."""
    if not status.stalled:
        from perdure.client.views import longest_idle

        return idle(node) if (node := longest_idle(nodes)) else ""
    since = [node.stalled_since for node in nodes if node.stalled_since and node.rank in status.stalled]
    for_ = f" for {age(min(since))}" if since else ""
    return f"no step on node{'s' if len(status.stalled) > 1 else ''} {', '.join(map(str, status.stalled))}{for_}"


def bytes_(count: int) -> str:
    """Formats a size in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def peaks(found: Peaks) -> str:
    """`at most 21.3 GiB of memory, 7.2 processors and 61.0 GiB of a GPU's 80.0 GiB on a node, in 3h 4m`."""
    parts = [f"{bytes_(found.memory)} of memory"] if found.memory else []
    parts += [f"{round(found.cpu, 2):.3g} processors"] if found.cpu else []
    parts += [f"{bytes_(found.shm)} of /dev/shm"] if found.shm else []
    if found.gpu_memory:
        parts.append(f"{bytes_(found.gpu_memory)} of a GPU's {bytes_(found.gpu_memory_total or found.gpu_memory)}")
    words = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) if parts else ""
    return f"at most {words} on a node, in {duration(found.watched)}" if words else ""


def unused(found: Unused) -> str:
    """`memory: asks for 64Gi and has used at most 21.3Gi in 3h 4m: 25Gi would do, 39Gi less for each of 8 nodes`."""
    nodes = f"each of {found.nodes} nodes" if found.nodes > 1 else "its node"
    return (
        f"{found.resource}: asks for {found.requested} and has used at most {found.used} in {duration(found.watched)}: "
        f"{found.enough} would do, {found.saved} less for {nodes}"
    )


def smaller(found: SmallerRequest) -> str:
    """`cpu: no machine has 64 free for node 0; 4 would do, by what nodes have used: ...`."""
    nodes = ", ".join(map(str, found.nodes[:_NAMED_NODES])) + (", ..." if len(found.nodes) > _NAMED_NODES else "")
    words = f"{found.resource}: no machine has room for {found.requested}, as node {nodes} requests"
    if not found.enough:
        return f"{words}; `scaling: {{relax: {{{found.resource}: LEAST}}}}` has nodes request less where less will do"
    source = "by what nodes have used" if found.measured else "by scaling.relax"
    if found.nowhere:
        return f"{words}, nor for {found.enough}, {source}: requested once one has"
    taken = "requested soon" if found.relaxes else f"set resources.{found.resource}, or scaling.relax.{found.resource}"
    return f"{words}; {found.enough} would do, {source}: {taken}"


def goal(status: JobStatus) -> str:
    """`policy deadline, finish_by 2026-12-01T08:00:00Z; 4 nodes chosen: ...`; empty where it takes all nodes."""
    from perdure.spec.scaling import goal_words

    if not status.goal or status.goal.get("policy", "max") == "max":
        return ""
    view = status.scaling
    chosen = f"{count(view.chosen, 'node')} chosen" if view and view.chosen is not None else ""
    found = ": ".join(filter(None, (chosen, view.problem or view.why))) if view else ""
    return "; ".join(filter(None, (goal_words(status.goal), found if not status.finished_at else "")))


def protection(status: JobStatus) -> str:
    """Whether the job controls the rendezvous of its ranks."""
    if not status.protected:
        return f"rendezvous UNPROTECTED: see `perdure explain {status.name}`"
    return "rendezvous protected" if status.generation else "no rendezvous yet"


def phase(name: str) -> str:
    """The phase in the color of its urgency, as rich markup."""
    style = PHASE_STYLES.get(name)
    return f"[{style}]{name}[/]" if style else name


def step(progress: Progress) -> str:
    """`step 48,210/120,000 40%`, or steps since the ranks started where the script does not report."""
    if progress.source == "REPORTED":
        if progress.total_steps:
            percent = 100 * progress.step / progress.total_steps
            return f"step {progress.step:,}/{progress.total_steps:,} {percent:.0f}%"
        return f"step {progress.step:,}"
    return f"{count(progress.step, 'step')} since the ranks started"


def rate(progress: Progress) -> str:
    """Steps per second, or seconds per step where those are long."""
    speed = progress.steps_per_second
    if not speed:
        return ""
    return f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.2f} s/step"


def eta(progress: Progress) -> str:
    """Time until the script's last step; empty where that is unknown."""
    if progress.source != "REPORTED" or not progress.total_steps or not progress.steps_per_second:
        return ""
    left = max(0, progress.total_steps - progress.step)
    return duration(left / progress.steps_per_second)


def nodes(status: JobStatus) -> str:
    """`3 nodes`, or `degraded 14/16 nodes (1 lost)`."""
    notes = [
        f"{len(ranks)} {word}" for ranks, word in ((status.lost, "lost"), (status.unreachable, "unreachable")) if ranks
    ]
    detail = f" ({', '.join(notes)})" if notes else ""
    if status.nodes >= status.nodes_max:
        return f"{count(status.nodes, 'node')}{detail}"
    degraded = "degraded " if status.phase == "RUNNING" else ""
    return f"{degraded}{status.nodes:,}/{count(status.nodes_max, 'node')}{detail}"


def plan(change: str, status: JobStatus) -> str:
    """`would release all nodes: llama is RUNNING with 2 nodes of 2:4`."""
    least, most = status.nodes_min, status.nodes_allowed
    size = f"{least}:{most}" if least < most else f"{most}"
    return f"would {change}: {status.name} is {status.phase} with {count(status.nodes, 'node')} of {size}"


def role(status: RoleStatus) -> str:
    """`RUNNING, 2 nodes, generation 3, 1 restart: 2 of 2 nodes, 2 ranks`."""
    most = count(status.nodes_max, "node")
    size = count(status.nodes, "node") if status.nodes >= status.nodes_max else f"{status.nodes:,}/{most}"
    parts = [status.phase.value, size, f"generation {status.generation}"]
    parts += [count(status.restarts, "restart")] if status.restarts else []
    return ", ".join(parts) + (f": {status.reason}" if status.reason else "")


def tree(roles: Sequence[RoleStatus]) -> list[str]:
    """The roles of a job with several as the lines of a tree."""
    branches = ["├─"] * (len(roles) - 1) + ["└─"] * bool(roles)
    lines = zip(branches, roles, strict=True)
    return [f"{branch} [bold]{escape(one.name)}[/]  {escape(role(one))}" for branch, one in lines]


def checkpoint(view: CheckpointView) -> str:
    """`step 48,100 durable, 4m 2s old; continued from step 48,000 in memory`; empty where nothing is known."""
    parts: list[str] = []
    if view.step is not None and view.committed_at is not None:
        parts.append(f"step {view.step:,} durable, {age(view.committed_at)} old")
    elif view.url:
        parts.append("no durable checkpoint of this run yet")
    # That the first world finds nothing is no news.
    begins = view.restored_from == "NOTHING" and view.restored_generation <= 1
    if view.restored_step is not None and not begins:
        continued = describe_restore(view.restored_step, view.restored_from, view.restored_again)
        parts.append(f"generation {view.restored_generation} {continued}")
    return "; ".join(parts)


def describe_restore(step: int, source: str | None, again: int | None) -> str:
    """`continued from step 48,000 in memory, with 1 step made again`; `began without a saved state`."""
    lost = f", with {count(again, 'step')} made again" if again else ", with no step made again" if again == 0 else ""
    if source == "NOTHING":
        return f"began without a saved state{lost if again else ''}"
    place = {"STORAGE": "in storage", "PEER": "in the memory of another node"}.get(source or "", "in memory")
    return f"continued from step {step:,} {place}{lost}"


def node_state(node: NodeView) -> tuple[str, str, str]:
    """The symbol, style and text of a node's state."""
    from perdure.client.views import begins, is_idle

    if node.phase == "LOST":
        return "✗", "red", "lost"
    if node.phase == "REMOVED":
        return "·", "dim", "removed"
    if not node.reachable:
        return "?", "yellow", "unreachable"
    if node.phase == "READY":
        if node.group_rank is None:
            return "P", "cyan", "parked"
        if is_idle(node):
            return "■", "yellow", idle(node)
        if node.stalled_since:
            return "■", "yellow", f"no step for {age(node.stalled_since)}"
        steps = node.progress and not begins(node)
        return ("■", "green", "stepping") if steps else ("□", "cyan", "in the world")
    return "…", "dim", node.phase.lower()


def incident_line(incident: IncidentView) -> str:
    """One incident on one line: its title and its outcome."""
    if incident.observation:
        after = "tried again" if incident.observation.storage else "nothing was done"
        if incident.observation.uncreated:
            after = "it was requested again, with growing pauses"
        if incident.observation.shared:
            after = "the job follows it"
        if incident.observation.new_goal:
            after = "the job follows it"
        if incident.observation.missed_goal:
            after = "it trains with the number that comes nearest"
        if incident.observation.missed_nodes:
            after = "they are requested again later"
        if incident.observation.smaller_requests:
            after = "they were requested again with less"
        if incident.observation.started_over:
            after = "the damaged ones are kept"
        if incident.observation.awaits_state:
            after = "the ranks wait" if incident.closed_at is None else "the wait is over"
        if incident.observation.lost_state:
            after = "the older state was taken, and nothing was deleted"
        if incident.observation.refused_change:
            after = "the world kept its size"
        if incident.observation.failed_check:
            after = "the node was replaced" if incident.observation.refused else "the node was taken in"
        if incident.observation.suspected:
            after = "new nodes avoid its machine"
    elif incident.stepping_at:
        after = f"stepping again in {duration(incident.stepping_at - incident.started_at)}"
    elif incident.running_at:
        after = f"running again in {duration(incident.running_at - incident.started_at)}"
    elif incident.followed_by:
        after = f"#{incident.followed_by} began before it was repaired"
    elif incident.decided_at:
        after = incident.action or "being repaired"
    else:
        after = "no verdict yet"
    return f"#{incident.number} {incident.title}: {after}"


def lost_time(incidents: list[IncidentView], now: datetime) -> timedelta:
    """The total time for which the world was stopped or stalled, over all incidents and observations of stalled
    ranks. A role that a user has suspended alone costs the rest of the job nothing."""
    costly = [
        one
        for one in incidents
        if (one.observation is None or one.observation.stalled)
        and not any(action.kind == "SUSPEND" and action.alone for action in one.actions)
    ]
    return sum(((incident.over_at or now) - incident.started_at for incident in costly), timedelta())
