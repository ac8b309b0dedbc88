"""What an actor is given to run a node, and what it adds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, SecretStr, field_serializer

from perdure.activities.nodes.configurations import agent_grant
from perdure.agent.config import GatewayRights
from perdure.base.credentials.tickets import digest_of, new_secret
from perdure.contract import NodeRequest

if TYPE_CHECKING:
    from perdure.activities.nodes.gateway import GatewayAccess


class RayMachine(BaseModel):
    """The machine on which Ray runs the actor."""

    address: str
    rack: str = ""
    parts: Path | None = None
    """The folder with the parts of the job's code; None for a job without any."""


class NodeTask(BaseModel):
    """Everything that the processes of a node need."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    request: NodeRequest
    environment: dict[str, str] = {}
    """Temporal's variables, for an agent that connects to it."""
    gateway: GatewayRights | None = None
    """Set: the agent connects to the gateway."""
    token: SecretStr | None = None
    """Proves the agent's rights at the gateway."""
    archive: str = ""
    """The name of the job's code, for the actor; empty for a job without any."""
    machine: RayMachine = RayMachine(address="")
    """Added by the actor."""

    @field_serializer("token", when_used="json")
    def _write_token(self, token: SecretStr | None) -> str | None:
        return token.get_secret_value() if token is not None else None


def task_of(request: NodeRequest, *, connection: Mapping[str, str], gateway: GatewayAccess | None) -> NodeTask:
    """Returns the task of a node.

    Args:
        request: the node.
        connection: Temporal's variables.
        gateway: set: the agent connects to the gateway, with a token of its own.
    """
    archive = request.spec.workdir.archive if request.spec.workdir else None
    task = NodeTask(request=request, environment=dict(connection), archive=archive.name if archive else "")
    if gateway is None:
        return task
    token = new_secret()
    grant = agent_grant(request, temporal_namespace=gateway.temporal_namespace, machine=digest_of(token), created=True)
    return task.model_copy(update={"gateway": gateway.rights(grant), "token": SecretStr(token)})
