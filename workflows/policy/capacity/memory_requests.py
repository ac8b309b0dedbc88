"""How much memory nodes request after the host's memory has run out: `memory_after_oom` decides it.

Each time 1.5 times what the node had, up to `scaling.memory_max`. A node is killed at its limit, so how much it needs
was never seen: too small a raise costs another kill, and a restart with it; too large a one may find no machine. A node
with half of what it needs is killed twice on the way, and ends with at most half more than it needs. DLRover doubles,
adds at most 8 GiB and ends at 64 GiB (`master/resource/job.py`); Kubernetes' vertical autoscaler multiplies by 1.2,
which takes four kills for the same.

Memory that grows as the training goes on is a leak, which more memory only delays. Each time it gets more, it lasts for
more steps. Two raises that did nothing else are the evidence, and it is raised no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perdure.base.words import count
from perdure.contract import RaiseMemory
from perdure.spec.quantities import quantity_of_bytes
from perdure.workflows.policy.state.host_memory import HostMemory, MemoryKill
from perdure.workflows.policy.state.job import RoleInJob

FACTOR = 1.5
"""What a node requests after its memory has run out, in times what it had."""
_MI = 2**20
_GI = 2**30
_COARSE_FROM = 8 * _GI
"""From here on a request is of whole GiB; below of a multiple of 256 MiB."""
_MOST_KILLS = 8
"""Kills that are remembered: 1.5 to the power of 8 is 25."""


class MemoryAfterOom(NamedTuple):
    """How much memory nodes request from now on."""

    memory: int | None
    """Bytes; None where it is not raised."""
    why_not: str = ""
    """Why it is not raised, with figures."""


def memory_after_oom(
    kill: MemoryKill, *, most: int | None, peak: int | None = None, earlier: Sequence[MemoryKill] = ()
) -> MemoryAfterOom:
    """Decides how much memory a node requests after its memory has run out.

    Args:
        kill: What it had.
        most: Bytes of `scaling.memory_max`; None where it must not be raised.
        peak: The most that a node of the role was seen to use; None where that is unknown. One that had no limit of its
            own may have used more than it requested.
        earlier: The kills after which it was raised before, the oldest first.
    """
    if most is None:
        return MemoryAfterOom(None, "scaling.memory_max is not set")
    used = max(kill.had, min(peak or 0, most))
    if used <= 0:
        return MemoryAfterOom(None, "how much memory it had is not known: set resources.memory")
    if kill.had >= most:
        return MemoryAfterOom(None, f"it had {_text(kill.had)}, and scaling.memory_max is {_text(most)}")
    if is_leak([*earlier, kill]):
        course = ", ".join(f"{_text(one.had)} for {count(one.steps or 0, 'step')}" for one in [*earlier, kill][-3:])
        return MemoryAfterOom(None, f"its use grows as the training goes on, which more memory only delays: {course}")
    unit = _GI if used * FACTOR >= _COARSE_FROM else 256 * _MI
    return MemoryAfterOom(min(-(-int(used * FACTOR) // unit) * unit, most))


def is_leak(kills: Sequence[MemoryKill]) -> bool:
    """Whether the last two raises did nothing but let the training make more steps before its memory ran out again."""
    steps = [one.steps for one in kills[-3:]]
    known = [one for one in steps if one]
    return len(known) == 3 and known[0] < known[1] < known[2]


def take(state: RoleInJob, action: RaiseMemory) -> RoleInJob:
    """Has all new nodes of the role request more memory."""
    generation, known = generation_of(state), state.host_memory.kills
    before = next((kill.steps for kill in known if kill.generation == generation), None)
    kill = MemoryKill(generation=generation, had=action.before, steps=before if action.steps is None else action.steps)
    kills = (*earlier_kills(state), kill)[-_MOST_KILLS:]
    return state.replace(host_memory=HostMemory(requested=action.memory, kills=kills))


def earlier_kills(state: RoleInJob) -> tuple[MemoryKill, ...]:
    """The kills in worlds before the current one, on which the job may decide more than once."""
    return tuple(kill for kill in state.host_memory.kills if kill.generation != generation_of(state))


def generation_of(state: RoleInJob) -> int:
    """The generation of the world that is over."""
    return state.world.generation if state.world is not None else state.generation


def _text(number: int) -> str:
    return quantity_of_bytes(number)
