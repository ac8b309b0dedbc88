"""The first activity of a job: returns the worker's site facts and validates the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import JsonValue
from temporalio import activity

from perdure.activities.nodes.backend import NodeBackend
from perdure.contract import GatewayFacts, JobCheck, SiteFacts, SiteReport
from perdure.contract.names import SCHEDULED_JOB, job_workflow_id
from perdure.spec.errors import SpecError
from perdure.spec.job import Backend, JobSpec
from perdure.spec.validate import validate_started

ADDRESS_VARIABLE = "PERDURE_GATEWAY_ADDRESS"
"""Host and port at which machines outside the cluster reach the gateway."""
AUTHORITY_VARIABLE = "PERDURE_GATEWAY_AUTHORITY"
"""A file with the certificate of the authority that issues the gateway's certificate."""
SERVER_NAME_VARIABLE = "PERDURE_GATEWAY_SERVER_NAME"
"""The name in that certificate, where the site's own is used."""

NO_COMMANDS = (
    "this site's workers run no commands of their users on their own machines, and nodes of this backend run none; "
    "use a webhook"
)


@runtime_checkable
class PolicyBackend(Protocol):
    """A backend with a policy about what jobs may request."""

    name: str

    def policy(self) -> dict[str, JsonValue]:
        """Returns the policy in force as plain data, which holds no secrets."""
        ...


def webhook_networks(backends: Iterable[NodeBackend]) -> list[str]:
    """The networks inside the site that its policy lets webhooks reach."""
    policies = [backend.policy() for backend in backends if isinstance(backend, PolicyBackend)]
    found = [policy.get("webhook_networks") for policy in policies]
    return [str(network) for networks in found if isinstance(networks, list) for network in networks]


class SiteActivities:
    """Returns facts that the worker has collected; calls no other service, so it cannot fail."""

    def __init__(
        self, facts: SiteFacts, backends: Iterable[NodeBackend] = (), gateway: GatewayFacts | None = None
    ) -> None:
        self._facts = facts
        self._gateway = gateway
        self._policies = {backend.name: backend.policy() for backend in backends if isinstance(backend, PolicyBackend)}

    @property
    def all(self) -> list[Callable[..., Any]]:
        """The activities to register with the worker."""
        return [self.site_facts, self.site_report, self.check_job]

    def learn(self, facts: SiteFacts) -> None:
        """Has later runs of jobs be told these facts."""
        self._facts = facts

    @activity.defn(name="site_facts")
    async def site_facts(self) -> SiteFacts:
        """Returns the site facts."""
        return self._facts

    @activity.defn(name="site_report")
    async def site_report(self) -> SiteReport:
        """Returns what this worker allows, and how machines reach the gateway."""
        return SiteReport(policies=self._policies, gateway=self._gateway)

    @activity.defn(name="check_job")
    async def check_job(self, spec: Any) -> JobCheck:
        """Returns the site facts, and the problem with a starting job's specification, if any.

        The specification is validated here once and never in workflow code: workflow code runs again whenever the job
        is replayed, possibly by a release with stricter rules.
        """
        try:
            job = validate_started(spec)
        except SpecError as error:
            return JobCheck(facts=self._facts, problem=str(error))
        problem = _problem_of_id(activity.info().workflow_id, job) or self._problem_of_commands(job)
        return JobCheck(facts=self._facts, problem=problem)

    def _problem_of_commands(self, job: JobSpec) -> str:
        """Why a job whose notifications run commands cannot run here; empty where it can: machines that join run them
        themselves, and on a worker that serves `local`, users run code on its machine anyway."""
        commands = [name for name, target in job.notifications.items() if target.command is not None]
        if not commands or job.backend is Backend.JOINED or Backend.LOCAL in self._facts.backends:
            return ""
        return f"notifications.{commands[0]}.command: {NO_COMMANDS}"


def _problem_of_id(workflow_id: str | None, job: JobSpec) -> str:
    """The problem of a job whose workflow ID is not the one of its name; empty if there is none. Backends create nodes
    only for groups whose IDs name the job."""
    expected = job_workflow_id(job.namespace, job.name)
    if workflow_id == expected:
        return ""
    return (
        f'workflow ID: got "{workflow_id}", expected "{expected}", by the namespace and the name in the specification; '
        f"a schedule, which appends the time to IDs, starts the workflow type {SCHEDULED_JOB} instead"
    )


def gateway_facts(variables: Mapping[str, str]) -> GatewayFacts | None:
    """Reads how machines reach the site's gateway, from the worker's environment; None if it does not say.

    Raises:
        ValueError: if the authority's certificate cannot be read.
    """
    path = variables.get(AUTHORITY_VARIABLE)
    if not path:
        return None
    try:
        authority = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{AUTHORITY_VARIABLE}: {path} cannot be read: {error}") from error
    return GatewayFacts(
        address=variables.get(ADDRESS_VARIABLE, ""),
        authority=authority,
        server_name=variables.get(SERVER_NAME_VARIABLE, ""),
    )
