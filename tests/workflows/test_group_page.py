"""Tests of a node group's page in the Temporal UI, on values only."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure.contract import DesiredNode, GroupDesire, NodeCredentials, NodePhase
from perdure.spec.validate import parse_spec
from perdure.workflows.group_page import details_of_group
from perdure.workflows.node_record import GroupInput, NodeRecord
from perdure.workflows.node_table import NodeTable
from perdure.workflows.policy.record.page import MOST_SHOWN
from tests.workflows.fleet import job_spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def table_of(*phases: NodePhase, unreachable: int | None = None, **desire: object) -> NodeTable:
    """A group whose nodes are in these phases."""
    spec = job_spec(str(len(phases)))
    tokens = [f"token-{rank:010d}" for rank in range(len(phases))]
    nodes = {rank: DesiredNode(incarnation=1, token=token) for rank, token in enumerate(tokens)}
    table = NodeTable(
        GroupInput(
            job_id="job/default/llama",
            job_first_run_id="run",
            uid="0a1b2c3d",
            group=0,
            role="worker",
            spec=parse_spec(spec),
            desire=GroupDesire.model_validate({"version": 1, "nodes": nodes, **desire}),
        )
    )
    for rank, phase in enumerate(phases):
        node = NodeCredentials(uid="0a1b2c3d", role="worker", rank=rank, incarnation=1, token=tokens[rank])
        since = NOW if rank == unreachable else None
        table.put(NodeRecord(node=node, since=NOW, phase=phase, host=f"gpu_{rank}", unreachable_since=since))
    return table


def lines_of(table: NodeTable) -> list[str]:
    return details_of_group(table).replace("\N{NO-BREAK SPACE}", "").splitlines()


def test_a_group_says_how_many_nodes_are_ready_what_was_requested_last_and_names_them() -> None:
    lines = lines_of(table_of(NodePhase.READY, NodePhase.READY, unreachable=1, reason="#1: <b>lost</b>"))
    assert lines[0] == "**1 of 2 nodes are ready**"
    assert r"- **Latest request**: #1: \<b\>lost\</b\>" in lines
    assert lines[-2].startswith(r"| 0.1 | READY |  | gpu\_0 |")
    assert lines[-1].startswith("| 1.1 | READY, unreachable |")


def test_a_large_group_counts_the_nodes_that_it_does_not_show() -> None:
    lines = lines_of(table_of(*[NodePhase.READY] * (MOST_SHOWN + 5)))
    assert lines[0] == f"**{MOST_SHOWN + 5} of {MOST_SHOWN + 5} nodes are ready**"
    assert lines[-1].startswith("| … | 5 more |")


def test_a_group_that_winds_down_counts_what_is_left() -> None:
    assert lines_of(table_of(NodePhase.READY, wind_down=True))[0] == "**Winding down**; nodes left: 1"
