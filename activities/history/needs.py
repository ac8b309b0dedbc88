"""What the roles of jobs that are alike usually need: how many nodes, for how long, and how much of a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from perdure.contract import JobPhase, PastJob, RoleNeeds, RoleUse
from perdure.workflows.policy.capacity import past_use

_NAMED: Final = 5
_MEASURED: Final = 100
"""The newest jobs whose peaks count: what a script needs changes with it."""


def needs_of(jobs: Iterable[PastJob]) -> list[RoleNeeds]:
    """Returns what each kind of role needed, the one of the most jobs first.

    Args:
        jobs: The jobs, the newest first.
    """
    by_kind: dict[tuple[str, str], list[tuple[PastJob, RoleUse | None]]] = defaultdict(list)
    for job in jobs:
        use = {one.role: one for one in job.use}
        kinds = {(role.image, role.command): use.get(role.role) for role in job.shape.roles}
        for kind, found in kinds.items():
            by_kind[kind].append((job, found))
    found = [_needs(image, command, own) for (image, command), own in by_kind.items()]
    return sorted(found, key=lambda one: (-one.jobs, one.image, one.command))


def _needs(image: str, command: str, own: Sequence[tuple[PastJob, RoleUse | None]]) -> RoleNeeds:
    jobs = [job for job, _ in own]
    good = [job for job in jobs if job.phase is JobPhase.SUCCEEDED and job.finished_at is not None]
    seconds = [(job.finished_at - job.started_at).total_seconds() for job in good if job.finished_at is not None]
    known = [(job, use.peaks) for job, use in own if use is not None and use.peaks is not None]
    measured = [(job, peaks) for job, peaks in known if past_use.speaks(job, peaks)][:_MEASURED]
    peaks = [found for _, found in measured]
    return RoleNeeds(
        image=image,
        command=command,
        jobs=len(own),
        succeeded=len(good),
        nodes=median((use.nodes if use is not None else 0) or job.nodes for job, use in own),
        seconds=median(seconds) if seconds else None,
        measured=len(measured),
        memory=past_use.most(peaks, lambda one: one.memory),
        cpu=past_use.most(peaks, lambda one: one.cpu),
        gpu_memory=past_use.most(peaks, lambda one: one.gpu_memory),
        shm=past_use.most(peaks, lambda one: one.shm),
        names=tuple(job.name for job, _ in measured[:_NAMED]),
    )
