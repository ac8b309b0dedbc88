"""Changes of running jobs that users can request, in words and as calls, for every interface that offers them.

An interface shows the words before it makes the call, so both are defined together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from perdure.base.errors import Refused
from perdure.client.scaling import new_goal
from perdure.contract import ScaleRequest
from perdure.spec.scaling import goal_words

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.contract import Accepted, JobStatus


@dataclass(frozen=True)
class Change:
    """A change of a job."""

    plan: str
    """What it does, as a clause that follows "would"."""
    send: Callable[[Client], Awaitable[Accepted]]
    """Requests it."""
    preview: Callable[[Client], Awaitable[JobStatus]] | None = None
    """Asks the job what its status would be then; None for changes whose words say it all."""
    check: Callable[[Client], Awaitable[object]] | None = None
    """Asks the job whether it refuses the change, which raises `Refused` then; None where only `send` finds out."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Makes changes of one job.

    Args:
        name: The job.
        namespace: Its namespace; None: that of the client.
        role: The role that is meant, of a job with several; None: the job, or its only role.
        reason: The reason that the job keeps.
    """

    name: str
    namespace: str | None = None
    role: str | None = None
    reason: str = ""

    def scale(self, nodes: str, resources: Mapping[str, str] | None = None, *, older: bool = False) -> Change:
        """Changes the number of nodes, and what new ones request; with `older` also where the newest state is lost."""
        amounts = " and ".join(f"{text} of {name}" for name, text in (resources or {}).items())
        request = ScaleRequest(
            nodes=nodes, role=self.role, reason=self.reason, resources=dict(resources or {}), older=older
        )
        plan = f"scale to {nodes} node{'' if nodes == '1' else 's'}"
        plan += f", new nodes with {amounts}" if amounts else ""
        return Change(
            f"{plan}, with an older state where the newest would be lost" if older else plan,
            lambda client: client.change(self.name, request, namespace=self.namespace),
            check=lambda client: client.preview_scale(
                self.name, nodes, namespace=self.namespace, role=self.role, older=older
            ),
        )

    def goal(
        self,
        status: JobStatus,
        given: Mapping[str, Any],
        *,
        nodes: str = "",
        resources: Mapping[str, str] | None = None,
    ) -> Change:
        """Changes how the number of nodes is chosen.

        Args:
            status: The present status of the role.
            given: Fields of `scaling`; the others stay where the policy has a use for them.
            nodes: The numbers to choose from; empty: as they are.
            resources: What new nodes request.

        Raises:
            Refused: if the job's worker knows no such change.
        """
        if status.goal is None:
            raise Refused(
                f"{self.name}: its worker is of a release that cannot change `scaling` of a running job; upgrade it"
            )
        scaling = new_goal(status.goal, given)
        request = ScaleRequest(
            nodes=nodes, scaling=scaling, role=self.role, reason=self.reason, resources=dict(resources or {})
        )
        return Change(
            f"have {goal_words(scaling)}",
            lambda client: client.change(self.name, request, namespace=self.namespace),
            lambda client: client.preview_scale(
                self.name, nodes, scaling=scaling, namespace=self.namespace, role=self.role
            ),
        )

    def suspend(self) -> Change:
        """Releases the nodes."""
        return Change(
            f"release the nodes of role {self.role}" if self.role else "release all nodes",
            lambda client: client.suspend(self.name, namespace=self.namespace, role=self.role, reason=self.reason),
        )

    def resume(self) -> Change:
        """Requests the nodes again."""
        return Change(
            f"request the nodes of role {self.role} again" if self.role else "request nodes again",
            lambda client: client.resume(self.name, namespace=self.namespace, role=self.role, reason=self.reason),
        )

    def restart(self, *, older: bool = False) -> Change:
        """Restarts all ranks in place; with `older` to continue with an older state than the one that they wait for."""
        plan = f"restart all ranks of role {self.role} in place" if self.role else "restart all ranks in place"
        return Change(
            f"{plan}, with an older state than the one that they wait for" if older else plan,
            lambda client: client.restart(
                self.name, namespace=self.namespace, role=self.role, reason=self.reason, older=older
            ),
        )

    def relaunch(self, node: int) -> Change:
        """Replaces a node."""
        return Change(
            f"replace node {node}",
            lambda client: client.relaunch_node(
                self.name, node, namespace=self.namespace, role=self.role, reason=self.reason
            ),
        )

    def pause_repairs(self, duration: timedelta, shown: str) -> Change:
        """Has what does not die shown and left as it is for a while, named `shown` for people."""
        return Change(
            f"pause repairs for {shown}",
            lambda client: client.pause_repairs(
                self.name, duration=duration, namespace=self.namespace, reason=self.reason
            ),
        )

    def resume_repairs(self) -> Change:
        """Has it repaired again."""
        return Change(
            "resume repairs",
            lambda client: client.resume_repairs(self.name, namespace=self.namespace, reason=self.reason),
        )

    def checkpoint(self) -> Change:
        """Has the ranks make a checkpoint in storage."""
        return Change(
            "make a checkpoint in storage",
            lambda client: client.save_checkpoint(self.name, namespace=self.namespace, reason=self.reason),
        )

    def cancel(self) -> Change:
        """Ends the job."""
        return Change(
            "cancel it and stop its nodes",
            lambda client: client.cancel(self.name, namespace=self.namespace, reason=self.reason),
        )
