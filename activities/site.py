"""What a job asks first: what its worker knows about where it runs, and whether it can be run at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from temporalio import activity

from perdure.spec.errors import SpecError
from perdure.spec.validate import validate_started
from workflows.messages import JobCheck, SiteFacts


class SiteActivities:
    """Answers from what the worker found out when it started; asks nothing itself, so it never fails."""

    def __init__(self, facts: SiteFacts) -> None:
        self._facts = facts

    @property
    def all(self) -> list[Callable[..., Any]]:
        """What the worker serves."""
        return [self.site_facts, self.check_job]

    @activity.defn(name="site_facts")
    async def site_facts(self) -> SiteFacts:
        """The facts."""
        return self._facts

    @activity.defn(name="check_job")
    async def check_job(self, spec: Any) -> JobCheck:
        """The facts, and what is wrong with the specification of a job that starts.

        It is checked here once, and never in the workflow's code: that runs again whenever the job is replayed, also by
        a release that allows less.
        """
        try:
            validate_started(spec)
        except SpecError as error:
            return JobCheck(facts=self._facts, problem=str(error))
        return JobCheck(facts=self._facts)
