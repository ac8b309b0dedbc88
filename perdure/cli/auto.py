"""What the roles of job files would request that leave their resources to jobs of the past: `resources: auto`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from perdure.base.errors import NoWorker, PerdureError
from perdure.cli.common import Session

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.contract import AutoResources, PastJob
    from perdure.spec.job import JobSpec

_PATIENCE: Final = 15.0
"""Seconds for an answer. A worker that keeps a history gives it within one, and a job waits for 5 itself."""


def choose(here: Session, jobs: Sequence[JobSpec]) -> list[tuple[AutoResources, ...]]:
    """Chooses for each job what it would request if it started now; the default, with the reason, where no history
    answers. Asks nothing where all roles say what they need."""
    asking = [job for job in jobs if any(role.resources.auto for role in job.roles.values())]
    if not asking:
        return [()] * len(jobs)
    from perdure.contract import JobShape
    from perdure.workflows.policy.capacity import past_use

    past: list[tuple[PastJob, ...]] = [()] * len(asking)
    problem = ""
    try:
        past = here.run(lambda client: _ask(client, asking))
    except PerdureError as error:
        problem = str(error)
    answers = iter(past)
    return [
        past_use.choose_all(job, JobShape.of(job), next(answers), problem=problem) if past_use.is_auto(job) else ()
        for job in jobs
    ]


def words(chosen: Sequence[AutoResources]) -> list[str]:
    """A line for each role."""
    if not chosen:
        return []
    from perdure.workflows.policy.capacity import past_use

    return [f"{one.role}: {past_use.words(one)}" for one in chosen]


async def _ask(client: Client, jobs: Sequence[JobSpec]) -> list[tuple[PastJob, ...]]:
    from perdure.contract import HistoryRequest, JobShape

    requests = [HistoryRequest(namespace=job.namespace, shape=JobShape.of(job)) for job in jobs]
    try:
        async with asyncio.timeout(_PATIENCE):
            answers = await asyncio.gather(*(client.history(request) for request in requests))
    except TimeoutError as error:
        raise NoWorker(f"no worker that keeps a history answered within {_PATIENCE:.0f} s") from error
    return [answer.jobs for answer in answers]
