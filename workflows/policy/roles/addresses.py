"""Where the nodes of each role are reached, as the nodes of all roles are told it.

The addresses of a role are those of its world, so that its nodes are told once, and not one by one as they join. Where
it will serve is known before.
"""

from __future__ import annotations

from perdure.contract import RoleAddresses
from perdure.contract.addresses import service_address
from perdure.contract.names import host_in_cluster
from perdure.spec.capabilities import CAPABILITIES, service_port
from perdure.spec.job import JobSpec
from perdure.workflows.policy.state.job import JobState
from perdure.workflows.policy.state.role import RoleState
from perdure_training.node_api.addresses import host_and_port


def addresses_by_role(state: JobState, job: JobSpec) -> dict[str, RoleAddresses]:
    """Returns the addresses of all roles of a job; empty for one role that serves no others, which asks for none."""
    if not job.tells_addresses:
        return {}
    return {name: _addresses_of(role, job, state.uid) for name, role in state.roles.items()}


def _addresses_of(role: RoleState, job: JobSpec, uid: str) -> RoleAddresses:
    serves = [service_address(job, uid, role.role, rank) for rank in range(role.nodes_max)]
    known = RoleAddresses(
        generation=role.generation,
        completed=bool(role.completed),
        serves=tuple(address for address in serves if address is not None),
    )
    world = role.world
    if world is None or role.completed:
        return known
    # In a role that serves a caller names the slot, which is the rank.
    serving = job.roles[role.role].ready is not None
    slots = range(max(world.members) + 1) if serving else sorted(world.members)
    return known.replace(
        addresses=tuple(_address_of(role, rank, job, uid) if rank in world.members else "" for rank in slots),
        generation=world.generation,
        processes=world.processes,
        ready=role.stepping and role.interruption is None,
    )


def _address_of(role: RoleState, rank: int, job: JobSpec, uid: str) -> str:
    named, port = CAPABILITIES[job.backend].names_nodes, service_port(job, role.role, rank)
    address = host_in_cluster(job, uid, role.role, rank) if named else role.nodes[rank].address
    return host_and_port(address, port) if address and port is not None else address
