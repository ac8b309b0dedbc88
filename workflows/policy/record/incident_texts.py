"""Limits the text of a job's incidents, which ride through continue-as-new and answer one query.

The newest incident is kept in full. Where all of them together exceed `BUDGET`, the oldest are shortened first, and
marked as shortened. The workflow's history has the texts that are left out.
"""

from __future__ import annotations

from perdure.contract import Evidence, IncidentView
from perdure.contract.base import shorten

BUDGET = 256 * 1024
"""Bytes of JSON of all incidents. The server rejects an answer to a query of 2 MB, and warns from 512 KB on."""

_SHORT = 120
"""Characters of one text of a shortened incident: fifty of them stay within the budget."""

_EVIDENCE = 3
"""Pieces of evidence that a shortened incident keeps, the first ones."""


def within_budget(incidents: tuple[IncidentView, ...]) -> tuple[IncidentView, ...]:
    """Returns the incidents, with the oldest of them shortened if all together are too large."""
    sizes = [len(incident.model_dump_json().encode()) for incident in incidents]
    total, kept = sum(sizes), list(incidents)
    for index, incident in enumerate(incidents[:-1]):
        if total <= BUDGET:
            break
        if not incident.left_out:
            kept[index] = _shorten(incident)
            total -= sizes[index] - len(kept[index].model_dump_json().encode())
    return tuple(kept)


def _shorten(incident: IncidentView) -> IncidentView:
    count = max(0, len(incident.evidence) - _EVIDENCE)
    dropped = f", and {count} pieces of its evidence left out" if count else ""
    return incident.replace(
        title=shorten(incident.title, _SHORT),
        action=shorten(incident.action, _SHORT),
        actions=(),
        waited_for=shorten(incident.waited_for, _SHORT),
        evidence=tuple(_short_evidence(one) for one in incident.evidence[:_EVIDENCE]),
        considered=tuple(one.replace(why_not=shorten(one.why_not, _SHORT)) for one in incident.considered),
        starts=None,
        own_lines=tuple(shorten(line, _SHORT) for line in incident.own_lines),
        log_tail=incident.log_tail[-_SHORT:],
        left_out=f"the texts of this older incident were shortened{dropped}: the workflow's history has them",
    )


def _short_evidence(evidence: Evidence) -> Evidence:
    return evidence.replace(text=shorten(evidence.text, _SHORT))
