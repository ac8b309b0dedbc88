"""How agents in pods reach the gateway: its address, and the grant that each of them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perdure.activities.nodes.configurations import agent_grant
from perdure.agent.config import GatewayConnection
from perdure.base.credentials.grants import PodName
from perdure.base.credentials.keyring import AUTHORITY, SIGNING_KEYS, KeyringInvalid, read_signing_keys
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


@dataclass(frozen=True, kw_only=True)
class GatewayAccess:
    """A site's gateway."""

    address: str
    """Host and port at which pods reach it."""
    temporal_namespace: str
    keyring: Path
    """The folder with the signing keys and the authority's certificate. It is read for each pod: keys are replaced
    while workers run."""

    def connection(self, request: NodeRequest) -> GatewayConnection:
        """Returns what the agent of a node needs.

        Raises:
            OSError: if the key ring cannot be read.
            KeyringInvalid: if it has no usable keys.
        """
        keys = read_signing_keys((self.keyring / SIGNING_KEYS).read_text(encoding="ascii"))
        pod = PodName(namespace=request.spec.namespace, name=request.name)
        grant = agent_grant(request, temporal_namespace=self.temporal_namespace, pod=pod)
        return GatewayConnection(
            address=self.address,
            authority=(self.keyring / AUTHORITY).read_text(encoding="ascii"),
            namespace=self.temporal_namespace,
            grant=grant.sign(keys),
            token_path=_TOKEN_FOLDER / "token",
        )


def token_volume() -> dict[str, Any]:
    """Returns the volume with the pod's own token for the gateway. Only the agent's container mounts it."""
    return {"name": TOKEN_VOLUME, "projected": {"sources": [_TOKEN_SOURCE]}}


def gateway_of(variables: Mapping[str, str], *, prefix: str, temporal_namespace: str) -> GatewayAccess | None:
    """Reads `GATEWAY_ADDRESS` and `GATEWAY_KEYRING`.

    Args:
        variables: The worker's environment.
        prefix: Put before the names of the variables.
        temporal_namespace: That of the worker.

    Raises:
        ValueError: if only one is set, or the key ring has no usable keys.
    """
    address, folder = (variables.get(f"{prefix}GATEWAY_{name}") for name in ("ADDRESS", "KEYRING"))
    if not (address or folder):
        return None
    if not (address and folder):
        raise ValueError(f"set both {prefix}GATEWAY_ADDRESS and {prefix}GATEWAY_KEYRING, or neither")
    keyring = Path(folder)
    try:
        read_signing_keys((keyring / SIGNING_KEYS).read_text(encoding="ascii"))
        (keyring / AUTHORITY).read_text(encoding="ascii")
    except OSError as error:
        raise ValueError(f"{prefix}GATEWAY_KEYRING: {error.filename} cannot be read: {error.strerror}") from error
    except KeyringInvalid as error:
        raise ValueError(f"{prefix}GATEWAY_KEYRING: {error}") from error
    return GatewayAccess(address=address, temporal_namespace=temporal_namespace, keyring=keyring)
