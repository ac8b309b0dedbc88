"""Settings of a site for its Ray cluster: where it is, and how agents on its machines reach the control plane.

The cluster is the site's and no job's choice: who answers at its address runs code in the worker's bridge.
"""

from __future__ import annotations

import os
import pwd
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from perdure.activities.nodes.gateway import GatewayAccess, gateway_of

VARIABLES: Final = "PERDURE_RAY_"
"""The prefix of the environment variables of these settings."""
ADDRESS_VARIABLE: Final = "PERDURE_RAY_ADDRESS"
USER_VARIABLE: Final = "PERDURE_RAY_USER"


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """The settings of a site."""

    address: str
    """As `ray.init` takes it: `host:6379` from one of the cluster's machines, `ray://host:10001` from elsewhere."""
    namespace: str = "perdure"
    """Ray's namespace of the nodes' actors."""
    python: str = sys.executable
    """The interpreter on the worker's machine that has Ray of the cluster's version."""
    user: str = ""
    """The user of this machine as whom the bridge runs, since jobs of the cluster may run code in it; empty: the
    worker's own."""
    node_python: str = ""
    """The interpreter on Ray's machines that has Perdure; empty: Ray's own."""
    connection: Mapping[str, str] = field(default_factory=dict[str, str])
    """Temporal's environment variables for agents; empty where they connect to the gateway."""
    gateway: GatewayAccess | None = None
    """The gateway that agents connect to; with None they connect to Temporal itself."""

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, *, connection: Mapping[str, str]
    ) -> RaySettings:
        """Reads `PERDURE_RAY_ADDRESS` and its siblings.

        Args:
            environment: the worker's.
            connection: Temporal's variables that the worker uses itself.

        Raises:
            ValueError: if the cluster's address is not set, the bridge cannot run as its user, or the gateway's
                settings are not complete.
        """
        address = environment.get(ADDRESS_VARIABLE)
        if not address:
            raise ValueError(f"{ADDRESS_VARIABLE} is not set; name the cluster, such as ray://head:10001")
        namespace = environment.get("TEMPORAL_NAMESPACE") or connection.get("TEMPORAL_NAMESPACE", "default")
        gateway = gateway_of(environment, prefix=VARIABLES, temporal_namespace=namespace)
        own = {name: value for name, value in environment.items() if name.startswith("TEMPORAL_")}
        if reached := environment.get("PERDURE_RAY_TEMPORAL_ADDRESS"):
            connection = {**connection, "TEMPORAL_ADDRESS": reached}
        return cls(
            address=address,
            namespace=environment.get("PERDURE_RAY_NAMESPACE") or cls.namespace,
            python=environment.get("PERDURE_RAY_PYTHON") or sys.executable,
            user=_user_of(environment),
            node_python=environment.get("PERDURE_RAY_NODE_PYTHON", ""),
            connection={} if gateway else {**own, **connection},
            gateway=gateway,
        )


def _user_of(environment: Mapping[str, str]) -> str:
    user = environment.get(USER_VARIABLE, "")
    if not user:
        return ""
    try:
        there = pwd.getpwnam(user)
    except KeyError:
        raise ValueError(f"{USER_VARIABLE} is {user!r}, and this machine has no such user; create it") from None
    if os.geteuid() not in (0, there.pw_uid):
        raise ValueError(
            f"{USER_VARIABLE} is {user!r}, and only a worker of root starts a process of another user; unset it, and "
            "give the worker an account of its own"
        )
    return user


def is_of_cluster(dashboard: str, address: str) -> bool:
    """Returns whether the URL of a dashboard has the host of a cluster's address, by its name or where that leads.

    An address without a host, such as `auto`, is that of any cluster.
    """
    theirs, ours = urlsplit(dashboard).hostname, _host_of(address)
    return not ours or theirs == ours or bool(_places_of(theirs or "") & _places_of(ours))


def _host_of(address: str) -> str | None:
    return urlsplit(address if "://" in address else f"//{address}").hostname if ":" in address else None


def _places_of(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return set()
