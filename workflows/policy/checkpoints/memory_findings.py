"""Tells why a world did not continue from memory, or which snapshots were damaged, from what its ranks found there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from perdure.contract import MemoryFinding, MemoryOrigin, MemoryProblem, RestoreSource

_ORIGINS = {
    MemoryOrigin.ADOPTED: "has none in the folder that its predecessor left",
    MemoryOrigin.NEW: "has none: its memory began empty, as no predecessor had left a folder on its machine",
    MemoryOrigin.HELD: "has none: its memory began empty, as another process still had its predecessor's folder",
}


def describe(findings: Sequence[MemoryFinding], source: RestoreSource | None) -> str:
    """One sentence for an incident; empty if there is nothing to tell."""
    if not findings:
        return ""
    ordered = sorted(findings, key=lambda finding: finding.rank)
    ranks = [(rank, list(some)) for rank, some in groupby(ordered, key=lambda finding: finding.rank)]
    text = "; ".join(f"of rank {rank}, {_of_rank(some)}" for rank, some in ranks)
    if source is RestoreSource.STORAGE:
        return f"memory was not used for the restore: {text}"
    return f"not all that was in memory could be loaded: {text}"


def _of_rank(findings: Sequence[MemoryFinding]) -> str:
    texts = [_describe(finding) for finding in findings]
    if all(finding.problem is MemoryProblem.MISSING for finding in findings):
        texts.append("no other node has one")
    return ", and ".join(texts)


def _describe(finding: MemoryFinding) -> str:
    node = "a node" if finding.node is None else f"node {finding.node}"
    steps = f"step{'s' if len(finding.steps) > 1 else ''} {', '.join(f'{step:,}' for step in finding.steps)}"
    owned = f"{node}'s of {steps}" if finding.steps else f"{node}'s"
    are = "are" if len(finding.steps) > 1 else "is"
    match finding.problem:
        case MemoryProblem.MISSING:
            return f"{node} {_ORIGINS.get(finding.origin, 'has none') if finding.origin else 'has none'}"
        case MemoryProblem.DAMAGED:
            return f"{owned} {are} damaged"
        case MemoryProblem.UNREADABLE:
            return f"{owned} could not be read"
        case MemoryProblem.OTHER_WORLD_SIZE:
            return f"{owned} {are} of a world of another size"
        case MemoryProblem.NOT_COMMON:
            return f"{owned} {are} not there for all ranks"
        case MemoryProblem.UNSOUND:
            return f"{owned} may not be sound"
        case MemoryProblem.NO_ROOM:
            return f"{node} has no room for what another node would send"
        case MemoryProblem.UNKNOWN:
            return f"{owned} could not be loaded"
