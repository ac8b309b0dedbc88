"""Decides what it means that ranks which should compute the same do not, and which saved states are sound.

The ranks themselves find out which of them is odd (`perdure_training.replay`), and the odd one reports itself: so no
node can have another one replaced. With two ranks it may not be known which of them is wrong, and both report it.

| what was found | the newest state that is known to be sound |
|-|-|
| the gradients of this step are wrong, and right when the same rank computes them again | that of the step before |
| a rank computes wrong gradients each time, or has other parameters | that of the last check, if it was in this world |
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import CorruptionKind, Evidence, EvidenceSource, FailureClass, FoundCorruption
from perdure.contract.base import shorten
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.checkpoint import CheckpointState
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState

_NAMED = 4
"""Checksums that become evidence."""


def failure_of(node: NodeState, found: FoundCorruption, time: datetime) -> NodeFailure:
    """The failure of the world that a finding ends."""
    return NodeFailure(
        rank=node.rank,
        failure=FailureClass.CORRUPTION,
        time=time,
        text=shorten(describe(found, node.host)),
        ranks=(found.rank,),
        corruption=found,
    )


def end_world(state: RoleInJob, failure: NodeFailure, now: datetime, *, generation: int) -> RoleInJob:
    """Ends the world in which a rank has computed wrongly."""
    state = interrupt(state, failure, now=now, generation=generation)
    for text in failure.corruption.checksums[:_NAMED] if failure.corruption is not None else ():
        evidence = Evidence(time=failure.time, source=EvidenceSource.AGENT, rank=failure.rank, text=text)
        state = incidents.add_evidence(state, evidence, now=now)
    return state


def judge(state: RoleInJob, now: datetime) -> RoleInJob:
    """Ends the world in which wrong results were found while repairs were paused, once they are not any longer. No rank
    finds them again, nor saves anything until the job has gone back."""
    if not state.wrong_results or state.repairs_paused_until is not None:
        return state
    results, state = state.wrong_results, state.replace(wrong_results=())
    for found in results:
        is_current = state.world is not None and found.generation == state.world.generation
        if is_current and not state.between_stages and not state.finished:
            state = end_world(state, found.failure, now, generation=found.generation)
    return state


def newest_loaded(found: FoundCorruption, checkpoints: CheckpointState) -> int:
    """The newest step whose state the next world may load.

    Snapshots in memory are of the newest steps only. So where nothing is stored, a job that went back to the last check
    would begin anew, and the state of the step before is loaded although it may not be sound.
    """
    before = found.step - 1
    return before if found.sound is None or checkpoints.durable is None else min(found.sound, before)


def describe(found: FoundCorruption, machine: str) -> str:
    """Describes a finding, for people."""
    where = f" on {machine}" if machine else ""
    device = f" ({found.device})" if found.device else ""
    who = f"rank {found.rank}{where}{device}"
    several = " and ".join(f"rank {rank}" for rank in found.suspects)
    match found.kind:
        case CorruptionKind.GRADIENTS if found.is_named:
            again = ", also when it computed them again" if found.repeats else ", and right when it computed them again"
            return f"{who} computed wrong gradients at step {found.step:,}{again}"
        case CorruptionKind.GRADIENTS:
            return f"the gradients of step {found.step:,} differ when {several} compute them: one of them is wrong"
        case _ if found.is_named:
            return f"{who} has other parameters than the other ranks before step {found.step:,}"
        case _:
            return f"{several} have different parameters before step {found.step:,}: one of them is wrong"
