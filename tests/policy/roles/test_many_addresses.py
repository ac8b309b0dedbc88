"""Tests that the addresses of all nodes of a large job fit into what the server takes of one task."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pydantic_core import to_json

from perdure.contract import ApplyDesired, DesiredNode, GroupDesire, NodeCredentials, NodePhase, RoleAddresses
from perdure.contract.names import NODES_PER_GROUP, host_in_cluster
from perdure.contract.worlds import pack_roles, unpack_roles
from perdure.spec.roles import MAX_NODES
from perdure.spec.validate import parse_spec
from perdure.workflows.carrying import pack
from perdure.workflows.node_desired import desired_of
from perdure.workflows.node_record import GroupInput, NodeRecord
from perdure.workflows.node_table import NodeTable

LARGEST_TASK = 4 * 1024 * 1024
"""Bytes of one task, as gRPC takes them."""
LARGEST_PAYLOAD = 2 * 1024 * 1024
"""Bytes of the arguments of a run, as the server takes them."""

ROLE = {"nodes": f"2:{MAX_NODES}", "image": "any", "command": ["serve"], "ready": {"port": 8000}}
JOB = parse_spec({"name": "j" * 40, "namespace": "n" * 40, "backend": "kubernetes", "roles": {"rollout": ROLE}})
NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODE = NodeCredentials(uid="0123abcd", role="rollout", rank=0, incarnation=1, token="t" * 32)


def addresses(nodes: int) -> dict[str, RoleAddresses]:
    """Of all nodes of a role that serves, each twice: where it is, and where it was known to be."""
    known = tuple(f"{host_in_cluster(JOB, NODE.uid, NODE.role, rank)}:8000" for rank in range(nodes))
    return {NODE.role: RoleAddresses(addresses=known, serves=known, generation=1, processes=nodes, ready=True)}


def table_with(roles: dict[str, RoleAddresses], *, unpacks: bool) -> NodeTable:
    """A group whose job has these roles, and the record of one node."""
    packed = pack_roles(roles)
    desire = GroupDesire(
        version=1,
        nodes={0: DesiredNode(incarnation=1, token=NODE.token)},
        roles={} if packed else roles,
        packed_roles=packed,
    )
    table = NodeTable(
        GroupInput(
            job_id="job/n/j", job_first_run_id="run", uid=NODE.uid, group=0, role=NODE.role, spec=JOB, desire=desire
        )
    )
    table.put(NodeRecord(node=NODE, phase=NodePhase.READY, since=NOW, joined=True, unpacks_roles=unpacks))
    return table


def test_the_largest_job_commands_a_whole_group_in_one_task():
    roles = addresses(MAX_NODES)
    table = table_with(roles, unpacks=True)
    desired = desired_of(table, table.records[0])
    assert desired.all_roles == roles
    command = len(to_json(ApplyDesired(node=NODE, version=1, desired=desired)))
    assert NODES_PER_GROUP * command < LARGEST_TASK


def test_the_largest_job_tells_all_its_groups_in_one_task():
    roles = addresses(MAX_NODES)
    groups = MAX_NODES // NODES_PER_GROUP + 1
    assert groups * len(pack_roles(roles)) < LARGEST_TASK / 4
    assert groups * len(to_json(roles)) > LARGEST_TASK, "as they are they would not fit"


@pytest.mark.parametrize("nodes", [2, 500])
def test_an_agent_of_an_older_release_is_sent_the_addresses_as_it_knows_them(nodes: int):
    roles = addresses(nodes)
    table = table_with(roles, unpacks=False)
    desired = desired_of(table, table.records[0])
    assert (desired.roles, desired.packed_roles) == (roles, "")


def test_the_addresses_of_a_few_nodes_can_be_read_in_the_history():
    assert pack_roles(addresses(20)) == ""
    assert unpack_roles(pack_roles(addresses(300))) == addresses(300)


def test_a_whole_group_whose_agents_know_all_addresses_continues_as_new():
    table = table_with(addresses(MAX_NODES), unpacks=True)
    [known] = table.records.values()
    taken = known.replace(acknowledged=desired_of(table, known))
    for rank in range(NODES_PER_GROUP):
        table.put(taken.replace(node=NODE.replace(rank=rank, token=f"{rank:032x}")))
    assert len(to_json(pack(table.to_carry()))) < LARGEST_PAYLOAD / 2
