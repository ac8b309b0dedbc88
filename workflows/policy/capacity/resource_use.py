"""Finds what nodes request and never use: what others could have, or what is paid for nothing.

Nothing is said before enough was seen (`_ENOUGH`, or a training from its first to its last step), nor where the request
has a reason that its use does not show: a rank needs a GPU however much of it, and memory that was raised after a kill
is needed although no peak shows it.

What would do is the highest use and `MARGIN` of it, which is what Kubernetes' vertical autoscaler recommends
(`recommendation-margin-fraction`), in whole processors and whole GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from math import ceil
from typing import Final

from perdure.contract import Peaks, Unused
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.job import JobSpec
from perdure.spec.quantities import amount, bytes_of, quantity_of_bytes
from perdure.workflows.policy.state.role import RoleState

MARGIN: Final = 0.15
_ENOUGH: Final = timedelta(hours=1)
"""The time of training after which a peak counts: evaluations and saves have mostly come by then."""
_WORTH: Final = 0.1
"""The least share of a request that is worth telling."""
_GI: Final = 2**30


def requests_of(state: RoleState, job: JobSpec) -> dict[str, str]:
    """Returns what a node of the role requests of processors and memory, where that has a meaning."""
    if not CAPABILITIES[job.backend].chooses_machines:
        return {}
    resources, chosen = job.roles[state.role].resources, memory_of(state)
    memory = resources.memory if chosen is None else quantity_of_bytes(chosen)
    cpu = state.smaller.get("cpu", resources.cpu)
    return {name: text for name, text in (("cpu", cpu), ("memory", memory)) if text is not None}


def memory_of(state: RoleState) -> int | None:
    """Returns the bytes that new nodes of the role request; None for `resources.memory` of the specification."""
    smaller = state.smaller.get("memory")
    return state.host_memory.requested or (None if smaller is None else bytes_of(smaller))


def cpu_of_node(state: RoleState, rank: int) -> str | None:
    """Returns the processors that a new node requests; None for `resources.cpu` of the specification."""
    return state.of_nodes.get(rank, {}).get("cpu", state.smaller.get("cpu"))


def memory_of_node(state: RoleState, rank: int) -> int | None:
    """Returns the bytes that a new node requests; None for `resources.memory` of the specification.

    Memory that was raised after a kill counts where it is more than what a user has given this node.
    """
    own = state.of_nodes.get(rank, {}).get("memory")
    return memory_of(state) if own is None else max(bytes_of(own), state.host_memory.requested or 0)


def unused(
    requests: Mapping[str, str], peaks: Peaks | None, *, nodes: int, complete: bool = False, raised: bool = False
) -> tuple[Unused, ...]:
    """Returns what is requested and was never used.

    Args:
        requests: What each node requests: `requests_of`.
        peaks: The most that a node has used.
        nodes: The number of nodes.
        complete: The training was seen from its first to its last step, so no later one can need more.
        raised: The memory was raised after a kill.
    """
    if peaks is None or not (complete or saw_enough(peaks)):
        return ()
    return tuple(_each(requests, peaks, raised=raised, nodes=nodes))


def saw_enough(peaks: Peaks) -> bool:
    """Returns whether the training was seen for long enough to say what it does not need."""
    return peaks.watched >= _ENOUGH.total_seconds()


def _each(requests: Mapping[str, str], peaks: Peaks, *, raised: bool, nodes: int) -> Iterator[Unused]:
    if "cpu" in requests and peaks.cpu is not None:
        requested, enough = float(amount(requests["cpu"])), cores_for(peaks.cpu)
        if requested - enough >= max(1.0, _WORTH * requested):
            yield Unused(
                resource="cpu",
                requested=requests["cpu"],
                used=f"{peaks.cpu:.3g}",
                enough=str(enough),
                saved=f"{requested - enough:g}",
                nodes=nodes,
                watched=timedelta(seconds=peaks.watched),
            )
    if "memory" in requests and peaks.memory and not raised:
        requested, enough = bytes_of(requests["memory"]), memory_for(peaks.memory)
        if requested - enough >= max(_GI, _WORTH * requested):
            yield Unused(
                resource="memory",
                requested=requests["memory"],
                used=f"{peaks.memory / _GI:.3g}Gi",
                enough=quantity_of_bytes(enough),
                saved=f"{(requested - enough) / _GI:.3g}Gi",
                nodes=nodes,
                watched=timedelta(seconds=peaks.watched),
            )


def memory_for(peak: int) -> int:
    """Returns the bytes to request for a node that uses this much at most."""
    return ceil(peak * (1 + MARGIN) / _GI) * _GI


def cores_for(peak: float) -> int:
    """Returns the processors to request for a node that uses this many at most."""
    return max(1, ceil(peak * (1 + MARGIN)))
