"""What the nodes of a job use of their machines, and what they request and never use."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.contract import JobPhase, JobStatus, NodeView
from perdure.contract.peaks import join_peaks
from perdure.workflows.policy.capacity.resource_use import unused


def with_peaks(status: JobStatus, nodes: Sequence[NodeView]) -> JobStatus:
    """Returns the status with the peaks that the nodes' agents report now: a job itself hears of them rarely."""
    peaks = join_peaks((status.peaks, *(node.peaks for node in nodes)))
    found = unused(
        status.requests,
        peaks,
        nodes=status.nodes_max,
        complete=status.phase is JobPhase.SUCCEEDED,
        raised=status.memory_raised,
    )
    return status.model_copy(update={"peaks": peaks, "unused": found})
