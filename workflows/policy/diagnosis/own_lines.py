"""Finds what the culprit's node alone has printed before it failed, by comparison with the other nodes that reported.

The reports come one by one, and most of them after the decision, so they are kept until the next world runs, and
compared again with each one that comes. Where a failure decides at once, the others do not fail: a few of them say
what they have printed when they take the next world. Of many victims a few are enough, too.
"""

from __future__ import annotations

from perdure.contract import IncidentView, PrintedLines
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import NodeLines

SHOWN = 3
"""Lines of an incident, the newest."""

_COMPARED = 8
"""Nodes whose lines are kept: the first ones, and the newest, which may be the culprit."""


def take(state: RoleInJob, rank: int, printed: PrintedLines) -> RoleInJob:
    """Keeps what a node reports of its output, and compares it with that of the others."""
    kept = tuple(one for one in state.lines if one.printed.generation == printed.generation)
    newer = any(one.printed.generation > printed.generation for one in state.lines)
    if newer or printed.generation > state.generation or any(one.rank == rank for one in kept):
        return state
    known = NodeLines(rank=rank, printed=printed)
    first_ones = kept if len(kept) < _COMPARED else kept[1:]
    return compare(state.replace(lines=(known, *first_ones)))


def compare(state: RoleInJob) -> RoleInJob:
    """Records the lines of the culprit's node that no other node has printed, if any other one has reported."""
    incident = next(filter(lambda known: _is_about(state, known), reversed(state.own_incidents)), None)
    if incident is None:
        return state
    own = next((one for one in state.lines if one.rank == incident.culprit), None)
    others = [one for one in state.lines if one.rank != incident.culprit]
    if own is None or not others:
        return state
    known = {key for one in others for key in one.printed.keys}
    lines = tuple(line.text for line in own.printed.rare if line.key not in known)[:SHOWN]
    return incidents.record_own_lines(state, incident, lines)


def _is_about(state: RoleInJob, incident: IncidentView) -> bool:
    about = state.lines[0].printed.generation if state.lines else None
    return incident.observation is None and incident.failure is not None and incident.generation_before == about
