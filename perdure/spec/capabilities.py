"""The capabilities of each backend: one table that workflows, checks of specifications and commands read.

A new backend is a member of `Backend`, an entry here, and its implementation. A backend without an entry fails at
import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .job import Backend, JobSpec


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Everything that depends on a backend alone."""

    creates_nodes: bool = False
    """The backend creates and deletes nodes; otherwise nodes join by themselves, and only their own agents can end
    them."""
    chooses_machines: bool = False
    """The backend chooses the machine of a new node, and can avoid machines."""
    ends_by_agents: bool = False
    """Agents receive from the job that their nodes are to end, in addition to the backend's own deletion, which waits
    for a cluster that does not answer."""
    keeps_shared_objects: bool = False
    """The backend keeps objects of a job other than its nodes, which must be removed with the last node or after it."""
    runs_beside_worker: bool = False
    """Nodes are processes of the worker's machine, which is the submitting one unless a server is configured."""
    uploads_workdir: bool = False
    """Nodes cannot see the submitting machine, and get the working directory as an upload."""
    needs_image: bool = False
    """Every role names a container image."""
    limits_memory: bool = False
    """A node has the memory that it requests, and no more; a later one may request more."""
    resizes_nodes: bool = False
    """The backend can give a node more memory while it runs."""
    names_nodes: bool = False
    """Where the nodes of a job know of each other, each has a name that leads to its newest incarnation."""

    @property
    def takes_submitted_folder(self) -> bool:
        """A folder of the submitting machine has a meaning as the working directory."""
        return self.runs_beside_worker or self.uploads_workdir


def complete(table: Mapping[Backend, Capabilities]) -> Mapping[Backend, Capabilities]:
    """Checks that every backend has an entry, and returns the table.

    Raises:
        LookupError: if a backend has no entry.
    """
    if missing := [backend for backend in Backend if backend not in table]:
        raise LookupError(f"backends without an entry: {', '.join(missing)}")
    return table


CAPABILITIES = complete(
    {
        Backend.LOCAL: Capabilities(creates_nodes=True, runs_beside_worker=True),
        Backend.KUBERNETES: Capabilities(
            creates_nodes=True,
            chooses_machines=True,
            keeps_shared_objects=True,
            uploads_workdir=True,
            needs_image=True,
            limits_memory=True,
            resizes_nodes=True,
            names_nodes=True,
        ),
        Backend.JOINED: Capabilities(ends_by_agents=True),
        Backend.RAY: Capabilities(
            creates_nodes=True,
            chooses_machines=True,
            ends_by_agents=True,
            keeps_shared_objects=True,
            uploads_workdir=True,
        ),
    }
)

BESIDE_WORKER = tuple(backend for backend, can in CAPABILITIES.items() if can.runs_beside_worker)
"""Names that are not a backend's can be compared with these, and not looked up in the table."""


LOOPBACK = "127.0.0.1"
"""The address of nodes that are processes of the worker's machine."""


def service_port(job: JobSpec, role: str, rank: int) -> int | None:
    """Returns the port of a node whose role has `ready`: nodes of one machine have different ones."""
    ready = job.roles[role].ready
    if ready is None:
        return None
    return ready.port + (rank if CAPABILITIES[job.backend].runs_beside_worker else 0)
