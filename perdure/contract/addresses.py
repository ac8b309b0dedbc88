"""Addresses that follow from a job's specification. Apart from names, which agents need without the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.contract.names import host_in_cluster
from perdure.spec.capabilities import CAPABILITIES, LOOPBACK, service_port
from perdure_training.node_api.addresses import host_and_port

if TYPE_CHECKING:
    from perdure.spec.job import JobSpec


def service_address(job: JobSpec, uid: str, role: str, rank: int) -> str | None:
    """Returns the address that a node with a port has for the whole life of its job; None where it depends on the
    node's machine."""
    port, can = service_port(job, role, rank), CAPABILITIES[job.backend]
    if port is None or not (can.names_nodes or can.runs_beside_worker):
        return None
    host = host_in_cluster(job, uid, role, rank) if can.names_nodes else LOOPBACK
    return host_and_port(host, port)
