"""What a site says once about its pods: the agent's image, and how agents reach Temporal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

VARIABLES = "PERDURE_KUBERNETES_"
"""How the environment variables of these settings begin."""


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """How pods are made in this site."""

    agent_image: str
    """Holds Perdure; the agent runs in it, and the launcher is copied from it."""
    agent_pull_policy: str = "IfNotPresent"
    connection: Mapping[str, str] = field(default_factory=dict[str, str])
    """Temporal's environment variables for agents: the address as pods reach it, its namespace, and what else they
    need that is no secret."""
    connection_secret: str | None = None
    """A Secret in the job's namespace whose keys are Temporal's environment variables, such as `TEMPORAL_API_KEY`."""
    creates_at_once: int = 64
    """Requests for pods that are under way at the same time."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> KubernetesSettings:
        """Reads `PERDURE_KUBERNETES_AGENT_IMAGE` and its siblings; all of Temporal's variables go to the agents.

        Raises:
            ValueError: if the agent's image is not named.
        """
        image = environment.get(f"{VARIABLES}AGENT_IMAGE")
        if not image:
            raise ValueError(f"{VARIABLES}AGENT_IMAGE is not set; name the image that holds Perdure's agent")
        connection = {name: value for name, value in environment.items() if name.startswith("TEMPORAL_")}
        if address := environment.get(f"{VARIABLES}TEMPORAL_ADDRESS"):
            connection["TEMPORAL_ADDRESS"] = address
        secret = environment.get(f"{VARIABLES}CONNECTION_SECRET")
        if secret:
            # What is in the secret must not stand in every pod's manifest as well.
            connection.pop("TEMPORAL_API_KEY", None)
        return cls(
            agent_image=image,
            agent_pull_policy=environment.get(f"{VARIABLES}AGENT_PULL_POLICY", cls.agent_pull_policy),
            connection=connection,
            connection_secret=secret or None,
        )
