"""The first activity of a job: returns the worker's site facts and validates the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from pydantic import JsonValue
from temporalio import activity

from activities.nodes.backend import NodeBackend
from perdure.spec.errors import SpecError
from perdure.spec.validate import validate_started
from workflows.messages import JobCheck, SiteFacts, SiteReport


@runtime_checkable
class PolicyBackend(Protocol):
    """A backend with a policy about what jobs may request."""

    name: str

    def policy(self) -> dict[str, JsonValue]:
        """Returns the policy in force as plain data, which holds no secrets."""
        ...


class SiteActivities:
    """Returns facts that the worker collected at its start; calls no other service, so it cannot fail."""

    def __init__(self, facts: SiteFacts, backends: Iterable[NodeBackend] = ()) -> None:
        self._facts = facts
        self._policies = {backend.name: backend.policy() for backend in backends if isinstance(backend, PolicyBackend)}

    @property
    def all(self) -> list[Callable[..., Any]]:
        """The activities to register with the worker."""
        return [self.site_facts, self.site_report, self.check_job]

    @activity.defn(name="site_facts")
    async def site_facts(self) -> SiteFacts:
        """Returns the site facts."""
        return self._facts

    @activity.defn(name="site_report")
    async def site_report(self) -> SiteReport:
        """Returns what this worker allows."""
        return SiteReport(policies=self._policies)

    @activity.defn(name="check_job")
    async def check_job(self, spec: Any) -> JobCheck:
        """Returns the site facts, and the problem with a starting job's specification, if any.

        The specification is validated here once and never in workflow code: workflow code runs again whenever the job
        is replayed, possibly by a release with stricter rules.
        """
        try:
            validate_started(spec)
        except SpecError as error:
            return JobCheck(facts=self._facts, problem=str(error))
        return JobCheck(facts=self._facts)
