"""The machine that joins: its identity in its allocation, and the address at which other nodes reach it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from perdure.activities.nodes.local.folders import NodeFolders
from perdure.base.state_folder import STATE_VARIABLE
from perdure_training.node_api.layout import short_links
from perdure_training.node_api.untrusted_files import make_own_folder

_TASKS = (
    ("SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("PALS_RANKID", "PALS_LOCAL_RANKID"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
    ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
)
"""Environment variables in which launchers number their tasks, in all and on one machine: Slurm, Open MPI, MPICH and
Intel MPI, HPE's PALS, IBM's jsrun, Flux."""

_PLACES = (*(place for place, _ in _TASKS), "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")
"""Those in which launchers and schedulers number the places of a job: also Kubernetes' indexed Jobs (under JobSet and
TrainJob, too), SkyPilot."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_LONGEST_NAME = 253
"""Characters, as RFC 1035 bounds names."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a node that Perdure did not create."""

    node_id: str
    """Unique, and stable: the same part of an allocation has the same value whenever it joins again."""
    chosen_id: bool = False
    """Whether the user has chosen the ID."""
    place: int | None = None
    """The index that its scheduler gave it."""
    host: str
    address: str
    """The address at which other nodes reach it."""
    metrics_port: int | None = None
    """The port at which the agent of its node serves metrics; None for none."""
    rack: str = ""
    """The rack, or whatever part of the site fails at once; empty where that is unknown."""


class InvalidAddress(ValueError):
    """A text that is no address of a machine; the message says what it lacks, or has too much."""


def own_address(text: str) -> str:
    """Reads the address of a machine: one of IPv4, one of IPv6 with or without brackets, or a host name.

    Raises:
        InvalidAddress: if it is none of these.
    """
    address = text.removeprefix("[").removesuffix("]") if text.startswith("[") else text
    try:
        return str(ip_address(address))
    except ValueError:
        pass
    host, _, port = text.rpartition(":")
    if port.isdecimal() and (host.endswith("]") or ":" not in host):
        raise InvalidAddress(f"{text!r} has a port, which worlds choose by themselves: write {host}")
    if len(address) > _LONGEST_NAME or not _HOST_NAME.fullmatch(address):
        raise InvalidAddress(f"{text!r} is no address of IPv4 or IPv6 and no host name")
    return address


def this_machine(
    server: str,
    *,
    node_id: str = "",
    address: str = "",
    metrics_port: int | None = None,
    rack: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Machine:
    """Describes the machine that this process runs on.

    Args:
        server: the Temporal server's address.
        node_id: overrides the ID derived from the scheduler's variables.
        address: overrides this machine's address on the route to the server.
        metrics_port: the port at which the agent serves metrics.
        rack: overrides the rack derived from Slurm's topology.
        environment: the environment that holds the scheduler's variables.

    Raises:
        OSError: if the machine has no route to the server, so that its own address is unknown.
        InvalidAddress: if `address` is none.
    """
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    place = next((int(number) for name in _PLACES if (number := environment.get(name, "")).isdecimal()), None)
    return Machine(
        node_id=node_id or _node_id(environment, host),
        chosen_id=bool(node_id),
        place=place,
        host=host,
        address=own_address(address) if address else address_towards(server),
        metrics_port=metrics_port,
        # Slurm's topology plugins name the switches from the top down, and the node last.
        rack=rack or environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
    )


def _node_id(environment: Mapping[str, str], host: str) -> str:
    """Returns Slurm's job ID with the host's name, or that name alone, which Kubernetes keeps for an index of a Job;
    and the task's index on its machine, which a restarted task keeps, if it is not the first one."""
    job = environment.get("SLURM_JOB_ID")
    index = next((number for place, name in _TASKS if place in environment and (number := environment.get(name))), "0")
    return (f"slurm-{job}-{host}" if job else host) + ("" if index == "0" else f"-{index}")


def address_towards(server: str) -> str:
    """Returns this machine's address on the route to the server. Nodes that reach the server are assumed to reach each
    other."""
    host, _, port = server.rpartition(":")
    family, kind, _, _, place = socket.getaddrinfo(
        host.strip("[]") or server, int(port or 7233), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing: connecting a UDP socket only makes the kernel choose the route.
        probe.connect(place)
        return str(probe.getsockname()[0])


def joined_nodes() -> NodeFolders:
    """Returns the nodes that this machine is in jobs, in `joined_folder`.

    Raises:
        PermissionError: as there.
    """
    return NodeFolders(joined_folder())


def joined_folder() -> Path:
    """Returns the folder of this machine's joined nodes: `PERDURE_STATE`, or a temporary folder of the user's own.

    It is not in the home folder, which clusters share over a network: sockets and locks need a local disk.

    Raises:
        PermissionError: if the temporary folder is not one of this user's own.
    """
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen).absolute()
    folder = short_links()
    make_own_folder(folder, remedy=f"set {STATE_VARIABLE} to a folder of your own")
    return folder
