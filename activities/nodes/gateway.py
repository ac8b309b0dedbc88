"""How agents of nodes that a worker creates reach the gateway: its address, and the grant that each of them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.agent.config import GatewayRights
from perdure.base.credentials.grants import Grant
from perdure.base.credentials.keyring import AUTHORITY, SIGNING_KEYS, KeyringInvalid, read_signing_keys


@dataclass(frozen=True, kw_only=True)
class GatewayAccess:
    """A site's gateway."""

    address: str
    """Host and port at which nodes reach it."""
    temporal_namespace: str
    keyring: Path
    """The folder with the signing keys and the authority's certificate. It is read for each node: keys are replaced
    while workers run."""

    def rights(self, grant: Grant) -> GatewayRights:
        """Returns what an agent needs, with its grant signed.

        Raises:
            OSError: if the key ring cannot be read.
            KeyringInvalid: if it has no usable keys.
        """
        keys = read_signing_keys((self.keyring / SIGNING_KEYS).read_text(encoding="ascii"))
        return GatewayRights(
            address=self.address,
            authority=(self.keyring / AUTHORITY).read_text(encoding="ascii"),
            namespace=self.temporal_namespace,
            grant=grant.sign(keys),
        )


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
