"""Test of a role with many nodes, each of which is told the addresses of all."""

from __future__ import annotations

import pytest

from perdure.contract import JobPhase
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import node, until

NODES = 128
"""A whole group, which commands its nodes in one task."""
PLACES = 1000
"""Those that the role may have, whose addresses are known before the nodes are there."""


@pytest.mark.long("workflows")
async def test_all_nodes_of_a_group_are_told_the_addresses_of_a_thousand_places(fleet: Fleet):
    fleet.pending = dict.fromkeys(range(NODES, PLACES), "no machine")
    role = {"nodes": f"{NODES}:{PLACES}", "image": "any", "command": ["serve"], "ready": {"port": 8000}}
    handle = await submit(fleet, job_spec(roles={"server": role}, backend="kubernetes"))
    await until(handle, lambda s: s.phase is JobPhase.RUNNING and s.nodes == NODES, within=240)
    for rank in range(NODES):
        known = (await node(fleet, handle, rank)).desired.all_roles["server"]
        assert len(known.addresses) == NODES
        assert len(known.serves) == PLACES
