"""How agents in pods reach the gateway: with the grant of their pod, and its service account token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perdure.activities.nodes.configurations import agent_grant
from perdure.activities.nodes.gateway import GatewayAccess
from perdure.agent.config import GatewayConnection
from perdure.base.credentials.grants import PodName
from perdure.base.credentials.names import AUDIENCE
from perdure.contract import NodeRequest

TOKEN_VOLUME: Final = "perdure-token"
_TOKEN_FOLDER: Final = Path("/perdure-token")
_TOKEN_SECONDS: Final = 3600
"""Lifetime of a service account token; Kubernetes renews it earlier."""

TOKEN_MOUNT: Final[Mapping[str, Any]] = {"name": TOKEN_VOLUME, "mountPath": str(_TOKEN_FOLDER), "readOnly": True}

_TOKEN_SOURCE: Final = {
    "serviceAccountToken": {"audience": AUDIENCE, "expirationSeconds": _TOKEN_SECONDS, "path": "token"}
}


def connection_of(request: NodeRequest, access: GatewayAccess) -> GatewayConnection:
    """Returns what the agent of a node needs.

    Raises:
        OSError: if the key ring cannot be read.
        KeyringInvalid: if it has no usable keys.
    """
    pod = PodName(namespace=request.spec.namespace, name=request.name)
    rights = access.rights(agent_grant(request, temporal_namespace=access.temporal_namespace, pod=pod))
    return GatewayConnection(**dict(rights), token_path=_TOKEN_FOLDER / "token")


def token_volume() -> dict[str, Any]:
    """Returns the volume with the pod's own token for the gateway. Only the agent's container mounts it."""
    return {"name": TOKEN_VOLUME, "projected": {"sources": [_TOKEN_SOURCE]}}
