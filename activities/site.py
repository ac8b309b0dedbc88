"""What a worker knows about where it runs, asked once per run of a job."""

from __future__ import annotations

from temporalio import activity

from workflows.messages import SiteFacts


class SiteActivities:
    """Answers from what the worker found out when it started; asks nothing itself, so it never fails."""

    def __init__(self, facts: SiteFacts) -> None:
        self._facts = facts

    @activity.defn(name="site_facts")
    async def site_facts(self) -> SiteFacts:
        """The facts."""
        return self._facts
