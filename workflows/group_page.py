"""A node group's page in the Temporal UI: the Markdown of its current details."""

from __future__ import annotations

from perdure.base.markdown import plain
from perdure.base.words import counted
from perdure.contract import NodePhase
from perdure.workflows.node_table import NodeTable
from perdure.workflows.policy.record.page import MOST_SHOWN, table_of_nodes


def details_of_group(table: NodeTable) -> str:
    """What the job desires of the group, why, and its nodes."""
    records, desire = table.records.values(), table.desire
    ready = sum(record.phase is NodePhase.READY and record.unreachable_since is None for record in records)
    if table.winding_down:
        first = f"**Winding down**; nodes left: {len(records) + len(table.retiring)}"
    else:
        first = f"**{ready:,} of {counted(len(desire.nodes), 'node', 'are')} ready**"
    world = desire.world
    lines = [
        first,
        "",
        f"- **Job**: {plain(table.group.job_id)}",
        f"- **World**: generation {world.generation}; members here: {len(world.members)}"
        if world
        else "- **World**: none",
    ]
    if desire.reason:
        lines.append(f"- **Latest request**: {plain(desire.reason)}")
    if records:
        lines += ["", *table_of_nodes("Node", table.views(first=MOST_SHOWN), total=len(records))]
    return "\n".join(lines)
