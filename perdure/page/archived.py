"""Jobs that Temporal does not know, or not any more, as their archive has them."""

from __future__ import annotations

import re

from perdure.base.errors import JobNotFound
from perdure.client.archive import ArchivedJobs, summary_of
from perdure.client.views import closed, overall_progress
from perdure.contract import ArchivedJob, ArchiveReport
from perdure.page.looks import JobLook, JobWatch

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""Names of jobs and namespaces. No other text becomes a part of a path: a namespace must not lead into another one."""


def look_of(record: ArchivedJob, folder: str = "") -> JobLook:
    """What a page shows of a job of which an archive keeps this.

    Args:
        record: What is kept.
        folder: Where it was found.
    """
    summary = summary_of(record)
    leading = closed(next(iter(record.roles.values())).status, summary)
    own = record.roles[leading.role].nodes
    return JobLook(
        record.written_at,
        summary,
        status=leading.model_copy(update={"warnings": leading.left}),
        nodes={name: role.nodes for name, role in record.roles.items()},
        progress=overall_progress(own, leading),
        incidents=record.incidents,
        spec=record.spec,
        data=record.datasets,
        archive=ArchiveReport(folder=folder, complete_at=record.written_at),
        is_archived=True,
    )


class Archive:
    """The place in which a site keeps jobs after their end.

    Args:
        url: The place, as in `outputs.archive`.
        for_others: As for `ArchivedJobs`.
    """

    def __init__(self, url: str, *, for_others: bool = False) -> None:
        self._url = url
        self._for_others = for_others

    async def look(self, watch: JobWatch, name: str, namespace: str) -> JobLook:
        """Looks at a job once; at its archive where Temporal does not know it.

        Raises:
            JobNotFound: if neither knows it.
        """
        try:
            return await watch.look()
        except JobNotFound:
            jobs = self.jobs(name, namespace)
            if jobs is None:
                raise
            status = await jobs.status(name)  # Refuses a record that is not complete.
            return look_of(await jobs.archived(name), (await jobs.archive(status)).folder)

    def jobs(self, name: str, namespace: str) -> ArchivedJobs | None:
        """What reads this job; None for names that no job has."""
        names = (name, namespace)
        if not all(map(_NAME.fullmatch, names)):
            return None
        return ArchivedJobs(self._url, namespace=namespace, for_others=self._for_others)
