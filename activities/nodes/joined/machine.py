"""The machine that joins: who it is in its allocation, and where others reach it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from activities.nodes.local.folders import STATE_VARIABLE, NodeFolders

_PLACES = ("SLURM_PROCID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")
"""How schedulers number what they start: Slurm, Kubernetes' indexed Jobs (JobSet and TrainJob, too), SkyPilot."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a node that Perdure did not create."""

    node_id: str
    """The same whenever the same part of an allocation comes again, and no other's."""
    place: int | None = None
    """The number that its scheduler gave it."""
    host: str
    address: str
    """Where other nodes reach it."""


def this_machine(
    server: str, *, node_id: str = "", address: str = "", environment: Mapping[str, str] = os.environ
) -> Machine:
    """This one.

    Args:
        server: the Temporal server's address.
        node_id: in place of what the scheduler says.
        address: in place of the one that this machine has towards the server.
        environment: with the scheduler's variables.

    Raises:
        OSError: if the machine has no way to the server, so that its own address is unknown.
    """
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    place = next((int(number) for name in _PLACES if (number := environment.get(name, "")).isdecimal()), None)
    return Machine(
        node_id=node_id or _node_id(environment, host),
        place=place,
        host=host,
        address=address or address_towards(server),
    )


def _node_id(environment: Mapping[str, str], host: str) -> str:
    """Slurm's job and the task on its node, which a task that is started again there keeps; else the host's name, which
    Kubernetes keeps for the index of a Job."""
    job, task = environment.get("SLURM_JOB_ID"), environment.get("SLURM_LOCALID", "0")
    if not job:
        return host
    return f"slurm-{job}-{host}" + ("" if task == "0" else f"-{task}")


def address_towards(server: str) -> str:
    """The address that this machine has on the way to the server: nodes that reach the server reach each other, too."""
    host, _, port = server.rpartition(":")
    family, kind, _, _, place = socket.getaddrinfo(
        host.strip("[]") or server, int(port or 7233), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing: it only has the kernel choose the way.
        probe.connect(place)
        return str(probe.getsockname()[0])


def joined_nodes() -> NodeFolders:
    """Where joined nodes of this machine keep their files: `PERDURE_STATE`, else a temporary folder of the user's own.

    Not the home folder, which clusters share over a network: sockets and locks work on the machine's own disk only.

    Raises:
        PermissionError: if another user has made the temporary folder.
    """
    if chosen := os.environ.get(STATE_VARIABLE):
        return NodeFolders(Path(chosen).absolute())
    folder = Path(tempfile.gettempdir()) / f"perdure-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; set {STATE_VARIABLE} to a folder of your own")
    return NodeFolders(folder)
