"""Whether a worker watches machines, and what their nodes are shared for, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from perdure.contract import SharingPolicy

WATCH_VARIABLE: Final = "PERDURE_CLUSTER"
"""`on`, or `off` for a worker that watches no machines. Unset: on."""
SHARING_VARIABLE: Final = "PERDURE_SHARING"
"""What nodes are shared for among jobs with `scaling.share`: `throughput`, `fair`, `priority`, or `off` for no advice.
Unset: throughput."""


class ClusterSettings(NamedTuple):
    """What a worker does for its machines."""

    watched: bool = True
    sharing: SharingPolicy | None = SharingPolicy.THROUGHPUT


def cluster_settings(variables: Mapping[str, str]) -> ClusterSettings:
    """Reads the settings.

    Raises:
        ValueError: if a variable is not valid.
    """
    watched = variables.get(WATCH_VARIABLE, "").strip() or "on"
    if watched not in ("on", "off"):
        raise ValueError(f'{WATCH_VARIABLE}: got "{watched}"; expected on or off')
    sharing = variables.get(SHARING_VARIABLE, "").strip() or SharingPolicy.THROUGHPUT
    known = [policy for policy in SharingPolicy if policy is not SharingPolicy.UNKNOWN]
    if sharing != "off" and sharing not in known:
        raise ValueError(f'{SHARING_VARIABLE}: got "{sharing}"; expected off or one of {", ".join(known)}')
    return ClusterSettings(watched == "on", None if sharing == "off" else SharingPolicy(sharing))
