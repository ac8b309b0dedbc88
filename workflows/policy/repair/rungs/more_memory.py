"""Has nodes request more memory after theirs has run out, within `scaling.memory_max`; stops where that cannot help."""

from __future__ import annotations

from dataclasses import replace

from perdure.contract import Progress, RaiseMemory, RestartRanks, Stop
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.quantities import bytes_of
from perdure.workflows.policy.capacity.memory_requests import (
    MemoryAfterOom,
    earlier_kills,
    generation_of,
    memory_after_oom,
)
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict
from perdure.workflows.policy.repair.rungs import spent_budget
from perdure.workflows.policy.repair.rungs.permanent_failure import stop
from perdure.workflows.policy.state.budget import made_progress
from perdure.workflows.policy.state.host_memory import MemoryKill


def decide(case: Case) -> Verdict | None:
    """Raises the memory of a node that is alive where it runs, if its backend can, else replaces it, since it keeps the
    memory that it has; one that is gone is replaced anyway."""
    found = _decide(case)
    if found is None or case.culprit.ran_out is None:
        return None
    if found.memory is None:
        return None if case.interruption.counted or _gained_steps(case) else _stop(case, found)
    if case.culprit.rank in case.gone or not case.may_replace or case.state.between_stages:
        return None
    if case.culprit.rank in _in_place(case):
        return spent_budget.decide(case) or case.blame(
            'out-of-memory/3 "raise its memory where it runs"',
            RestartRanks(nodes=_nodes(case)),
            rejected=(
                Rejected(case.replace(_nodes(case)), "its limit can be raised where it runs"),
                Rejected(Stop(), "scaling.memory_max allows more memory"),
            ),
        )
    return spent_budget.decide(case) or case.blame(
        'out-of-memory/1 "replace it by a node with more memory"',
        case.replace(_nodes(case)),
        RestartRanks(others=True),
        rejected=(
            Rejected(RestartRanks(), "its memory would run out again"),
            Rejected(Stop(), "scaling.memory_max allows more memory"),
        ),
    )


def add(case: Case, verdict: Verdict) -> Verdict:
    """Adds to a verdict what becomes of the nodes' requests for memory."""
    found = _decide(case)
    if found is None:
        return verdict
    if found.memory is None:
        return replace(verdict, rejected=(*verdict.rejected, Rejected(RaiseMemory(), found.why_not)))
    kill = _kill(case)
    in_place = tuple(rank for rank in _in_place(case) if rank not in verdict.replaced)
    raised = RaiseMemory(nodes=_nodes(case), memory=found.memory, before=kill.had, steps=kill.steps, in_place=in_place)
    return replace(verdict, actions=(*verdict.actions, raised))


def _decide(case: Case) -> MemoryAfterOom | None:
    """How much is requested from now on; None where no memory has run out, or a request changes nothing."""
    most = case.job.roles[case.state.role].scaling.memory_max
    if most is None or not _nodes(case) or not CAPABILITIES[case.job.backend].limits_memory:
        return None
    return memory_after_oom(_kill(case), most=bytes_of(most), peak=_peak(case), earlier=earlier_kills(case.state))


def _nodes(case: Case) -> tuple[int, ...]:
    return tuple(sorted({one.rank for one in case.interruption.failures if one.ran_out is not None}))


def _peak(case: Case) -> int | None:
    """The most that a node was seen to use. Up to its limit this says nothing more than the kill does."""
    return case.state.peaks.memory if case.state.peaks is not None else None


def _in_place(case: Case) -> tuple[int, ...]:
    """Nodes that are alive after their own limit was reached, and can be given a higher one."""
    if not CAPABILITIES[case.job.backend].resizes_nodes or case.state.between_stages:
        return ()
    limited = {one.rank for one in case.interruption.failures if one.ran_out is not None and one.ran_out.limit}
    return tuple(node.rank for node in case.survivors if node.rank in limited)


def _kill(case: Case) -> MemoryKill:
    state = case.state
    memory = case.job.roles[state.role].resources.memory
    specified = bytes_of(memory) if memory is not None else 0
    ends = [one.ran_out for one in case.interruption.failures if one.ran_out is not None]
    progress = _progress(case)
    return MemoryKill(
        generation=generation_of(state),
        had=max(max(specified if one.requested is None else one.requested, one.limit or 0) for one in ends),
        steps=progress.generation_steps if progress is not None else None,
    )


def _progress(case: Case) -> Progress | None:
    """The progress of the world that is over; None where no agent has reported it."""
    progress = case.state.progress
    return progress if progress is not None and progress.generation == generation_of(case.state) else None


def _gained_steps(case: Case) -> bool:
    known = case.state.memory
    if _progress(case) is None:
        # A pod whose memory ran out has reported no more than its first step.
        return case.state.stepped
    return made_progress(
        case.state.progress, best_step=known.best_step, last_generation_steps=known.last_generation_steps
    )


def _stop(case: Case, found: MemoryAfterOom) -> Verdict:
    rule = 'out-of-memory/2 "no step gained, and more memory is not requested: stop"'
    reason = f"{case.culprit.text}; more memory is not requested: {found.why_not}"
    return stop(case, rule, reason, 1)
