"""Finds the ranks that hang, in what the agents of all nodes have seen of ranks that make no step.

Ranks that train together wait for each other, so most of them stand in the same call, and one that hangs stands
elsewhere. But one that evaluates, saves or computes a long time stands elsewhere, too. So the job acts only where two
independent signs agree: where the ranks are, and what the kernel says of the one that is elsewhere. Where the ranks are
is told by their calls and by torch's flight recorder, where it has one; if these contradict each other, it is unknown.
Whatever looks like work is shown and left alone, since a wrong restart of a long evaluation would come again and again.

All nodes must have been seen, except for a process that was stopped: that one is not doing anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import takewhile

from perdure.contract import (
    CollectiveCall,
    Evidence,
    EvidenceSource,
    FailureClass,
    Hang,
    HangKind,
    Member,
    StackFrame,
    StalledRank,
    StallLook,
)
from perdure.spec.job import JobSpec
from perdure.spec.recovery import HangAction
from perdure.workflows.policy.diagnosis import collectives
from perdure.workflows.policy.diagnosis.collectives import Comparison
from perdure.workflows.policy.diagnosis.hang_words import describe, rank_names, sign_of, verb
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts.agent_messages import take_progress
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState

SIGNS_TO_ACT = 2
"""Independent signs that must agree before a job does anything."""

_FRESH = timedelta(seconds=30)
"""The age of the newest look at which a job still acts on it: one that was delayed by an outage says nothing of now."""
_STALLED_STEPS = 5
"""Usual steps that were not made, for that to be a sign: the same number as for the agents' first look."""
_IDLE = 20.0
"""Percent of a processor below which a rank does not compute. One that waits in gloo uses less than 1."""
_NOTHING = 5.0
"""Percent of a processor that a rank and its children use at most, if none of them does anything."""
_BUSY = 80.0
"""Percent of a processor from which on a process computes whose main thread sleeps."""
_LONG_PHASE = re.compile(
    r"eval|valid|infer|generat|predict|save|saving|checkpoint|restor|compil|export|upload|download|warm_?up|profil"
    r"|(^|_)test"
)
"""Names of functions and files that do work which may take long: a rank in one of them is never called a hang for what
it does there."""

_ALL_STAYED = "no rank left its calls between the looks, and a rank that waits for its device computes"
_DECORATORS = ("/torch/distributed/c10d_logger.py",)
_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
_SAVES = ("/torch/distributed/checkpoint/", "/torch/serialization.py", "/subprocess.py")
"""Libraries that do work which may take long, by themselves or in another process."""
_DEBUGGERS = re.compile(
    r"/(pdb|bdb|code|remote_pdb|web_pdb|rpdb)\.py$|/(debugpy|pydevd|_pydevd_bundle|ipdb|pudb|remote_pdb|web_pdb)/"
    r"|/IPython/(core/debugger|terminal/embed|terminal/interactiveshell)\.py$"
)
"""Files of debuggers and prompts, in packages: who is at one of them has all the time there is."""
_PACKAGES = re.compile(r"/(site|dist)-packages/(?!torch/)")
"""Where packages are that do work of their own for a script, in one call as long as they please; not torch, whose
calls are known."""
_BACKWARD = "/torch/autograd/graph.py"
_DATA_LOADER = "/torch/utils/data/"


@dataclass(frozen=True, eq=False)
class _Rank:
    """One rank, as its node has seen it."""

    node: int
    seen: StalledRank
    calls: tuple[StackFrame, ...]
    collectives: tuple[CollectiveCall, ...]
    long: bool
    silent: bool
    """It does not tell its collectives, and others do: its interpreter is blocked."""

    @property
    def cpu(self) -> float:
        return self.seen.cpu_percent if self.seen.cpu_percent is not None else 100.0

    @property
    def computes(self) -> bool:
        """It used a processor."""
        return self.seen.runs or self.cpu >= _IDLE

    @property
    def rests(self) -> bool:
        """It did not compute."""
        return self.seen.state == "S" and self.cpu < _IDLE

    @property
    def sleeps(self) -> bool:
        """It did not compute, and was in the same calls all the time."""
        return self.rests and self.seen.steady

    @property
    def waits_for_device(self) -> bool:
        """It was in the same calls all the time, with a collective that its device has not ended. It may compute: a
        rank asks the driver again and again."""
        waits = any(call.on_device and not call.ended for call in self.collectives)
        return waits and self.seen.steady and not self.seen.transfers and not self.may_take_long

    @property
    def stays(self) -> bool:
        """It did nothing but wait."""
        return self.sleeps or self.waits_for_device

    @cached_property
    def waits_in(self) -> str:
        """The collective that it waits in; empty if it is in none, as far as its calls tell."""
        inner = next((call for call in self.calls if not call.file.endswith(_DECORATORS)), None)
        if inner is None:
            return ""
        if any(part in inner.file for part in _COLLECTIVES) and _SAVES[0] not in inner.file:
            return inner.function
        # The engine waits there for collectives of DistributedDataParallel, and computes there as well.
        if inner.file.endswith(_BACKWARD) and (self.sleeps or self.waits_for_device):
            return "backward"
        return "a collective of the device" if self.waits_for_device else ""

    @property
    def own_call(self) -> StackFrame | None:
        """The innermost call of the script."""
        return next((call for call in self.calls if not call.of_library), None)

    @property
    def place(self) -> tuple[str, str, int]:
        """Where it is, to compare with other ranks."""
        call = self.own_call
        return (self.waits_in, call.file if call else "", call.line if call else 0)

    @property
    def debugged(self) -> bool:
        """A person looks at it: it is traced, or at a debugger's prompt."""
        at_prompt = any(call.of_library and _DEBUGGERS.search(call.file) for call in self.calls)
        return self.seen.state == "t" or at_prompt

    @property
    def in_package(self) -> bool:
        """The script has called a package, which does whatever it does there."""
        inner = takewhile(lambda call: call.of_library, self.calls)
        return any(_PACKAGES.search(call.file) for call in inner)

    @property
    def may_take_long(self) -> bool:
        """It does something that may take long, by the names of its calls."""
        if any(part in call.file for call in self.calls for part in _SAVES):
            return True
        own = (call for call in self.calls if not call.of_library)
        return any(_LONG_PHASE.search(name) for call in own for name in (call.function.lower(), _stem(call.file)))


def find(looks: Mapping[int, StallLook], members: Mapping[int, Member]) -> Hang | None:
    """Compares the ranks of a world that makes no step.

    Args:
        looks: The newest look of each node (slot) that has one.
        members: The nodes whose ranks have stepped in this world, and so should step.

    Returns:
        Who hangs, with the signs; None where too little is known.
    """
    states = Counter(rank.state for look in looks.values() for rank in look.ranks)
    expected = sum(member.processes for member in members.values())
    all_seen = members.keys() <= looks.keys() and states.total() >= max(expected, 2)
    if not all_seen and not states.keys() & {"t", "T"}:
        return None
    recorded = any(look.collectives for look in looks.values())
    ranks = [
        _Rank(node, seen, _calls(look, seen), _collectives(look, seen), look.long, recorded and seen.silent)
        for node, look in sorted(looks.items())
        for seen in look.ranks
    ]
    if any(rank.debugged for rank in ranks):
        return Hang(kind=HangKind.DEBUGGED)
    if stopped := _find_stopped(ranks, looks):
        return stopped
    if not all_seen:
        return None
    compared = collectives.compare({rank.seen.rank: rank.collectives for rank in ranks})
    if any(looks[node].early for node in members):
        return _find_crossed(ranks, compared) if compared is not None and compared.same_number else None
    in_kernel = [rank for rank in ranks if rank.seen.state == "D" and _does_nothing(rank)]
    if any(not rank.calls for rank in _others(ranks, in_kernel)):
        return None
    if in_kernel:
        # A file server that starts again answers within a minute or two, and a node is replaced for it.
        return None if any(look.unusual for look in looks.values()) else _find_in_kernel(in_kernel, ranks)
    return _find_crossed(ranks, compared) if compared is not None and compared.crossed else _compare(ranks, compared)


def of(state: RoleInJob) -> Hang | None:
    """What is found in the present looks at the ranks of a world."""
    world = state.world
    if world is None or all(node.look is None for node in state.nodes.values()):
        return None
    should_step = {node.rank for node in state.members if node.stepped >= world.generation and node.alive}
    looks = {
        node.rank: node.look
        for node in state.members
        if node.look is not None and node.look.generation == world.generation
    }
    hang = find(looks, {rank: member for rank, member in world.members.items() if rank in should_step})
    if hang is None or hang.node is None:
        return hang
    return hang.replace(incarnation=state.nodes[hang.node].incarnation)


def judge(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Ends a world whose ranks wait for one that hangs, where enough signs agree."""
    hang = of(state) if _may_act(state, job, now) else None
    world = state.world
    if hang is None or world is None or len(hang.signs) < SIGNS_TO_ACT:
        return state
    progress = [node.look.progress for node in state.members if node.look is not None]
    for known in progress:
        state = take_progress(state, known)
    last_steps = {node.rank: node.look.since for node in state.members if node.look is not None}
    failure = NodeFailure(
        rank=hang.node if hang.node is not None else state.members[0].rank,
        failure=FailureClass.RANK_HANG,
        time=now,
        text=describe(hang),
        log_tail=_stack(hang),
    )
    state = interrupt(state, failure, now=now, generation=world.generation, last_steps=last_steps)
    interruption = state.interruption
    if interruption is None:
        return state
    for sign in hang.signs:
        evidence = Evidence(time=now, source=EvidenceSource.AGENT, rank=hang.node, text=sign)
        state = incidents.add_evidence(state, evidence, now=now)
    nodes = {rank: one.replace(look=None) for rank, one in state.nodes.items()}
    return state.replace(interruption=interruption.replace(hang=hang), nodes=nodes)


def own_look(state: RoleInJob, node: NodeState, look: StallLook) -> StallLook:
    """A look without ranks that the node does not have: it speaks for its own ranks only."""
    member = state.world.members.get(node.rank) if state.world is not None else None
    own = range(member.base_rank, member.base_rank + member.processes) if member is not None else range(0)
    return look.replace(ranks=tuple(rank for rank in look.ranks if rank.rank in own))


def _may_act(state: RoleInJob, job: JobSpec, now: datetime) -> bool:
    """Whether a hang would be acted on now."""
    looks = [node.look for node in state.nodes.values() if node.look is not None]
    if not looks or job.recovery.on_hang is HangAction.REPORT or state.repairs_paused_until is not None:
        return False
    if state.interruption is not None or state.outcome is not None or state.between_stages or state.postponed:
        return False
    # A node that cannot be reached may be one that steps again.
    reachable = all(node.reachable for node in state.members)
    return reachable and now - max(look.taken_at for look in looks) <= _FRESH


def _find_stopped(ranks: Sequence[_Rank], looks: Mapping[int, StallLook]) -> Hang | None:
    stopped = [rank for rank in ranks if rank.seen.state == "T" and rank.seen.steady]
    if not stopped:
        return None
    others, signs = _others(ranks, stopped), tuple[str, ...]()
    # Someone who stops all processes of a node or a job does so on purpose.
    if len(stopped) < len(ranks) or len(stopped) == 1:
        missed = min(looks[rank.node].usual_steps for rank in stopped)
        names = rank_names([rank.seen.rank for rank in stopped])
        signs = (f"the kernel says that {names} {verb(len(stopped), 'be')} stopped",)
        if missed >= _STALLED_STEPS:
            signs = (*signs, f"no rank of the node has stepped in the time of {missed:,} usual steps")
        if others and all(rank.waits_in for rank in others):
            signs = (*signs, f"all ranks that were seen wait for {'them' if len(stopped) > 1 else 'it'}")
    return _hang(HangKind.STOPPED, stopped, others, signs)


def _find_in_kernel(in_kernel: Sequence[_Rank], ranks: Sequence[_Rank]) -> Hang:
    others = _others(ranks, in_kernel)
    names = rank_names([rank.seen.rank for rank in in_kernel])
    signs = (f"{names} slept in the kernel and never ran between the looks",)
    if others and all(rank.waits_in for rank in others):
        signs = (*signs, f"all other ranks wait for {'them' if len(in_kernel) > 1 else 'it'}")
    return _hang(HangKind.KERNEL, in_kernel, others, signs)


def _find_crossed(ranks: Sequence[_Rank], compared: Comparison) -> Hang:
    """Each rank waits in a collective for one that waits in another."""
    apart = [rank for rank in ranks if rank.seen.rank in compared.apart]
    others = _others(ranks, apart)
    calls = " and ".join(collectives.words(call) for call in (compared.awaited, compared.other) if call is not None)
    signs = (f"torch's flight recorder shows that ranks wait for each other, in {calls}",)
    elsewhere = [rank for rank in ranks if rank.calls and not rank.waits_in]
    # The recorder contradicts the calls of a rank that is elsewhere.
    agree = not elsewhere or elsewhere in (apart, list(ranks))
    if agree and all(rank.rests for rank in ranks):
        signs = (*signs, "no rank used a processor between the looks")
    # Unless the collectives can never match, a rank that computes may still come.
    elif agree and all(rank.stays and (compared.same_number or rank.long) for rank in ranks):
        signs = (*signs, _ALL_STAYED)
    hang = _hang(HangKind.MISMATCH, apart, others, signs, compared)
    return hang if apart else hang.replace(at=_line(others[-1].own_call))


def _compare(ranks: Sequence[_Rank], compared: Comparison | None) -> Hang | None:
    """Compares ranks of which none is stopped or sleeps in the kernel."""
    absent = [rank for rank in ranks if compared is not None and rank.seen.rank in compared.waited_for]
    waiting = [rank for rank in ranks if rank.waits_in] or (_others(ranks, absent) if absent else _together(ranks))
    if not waiting:
        return None
    elsewhere = _others(ranks, waiting)
    if not elsewhere:
        return _compare_waiting(waiting, compared, absent)
    if len(elsewhere) > len(waiting):
        return None
    names = rank_names([rank.seen.rank for rank in elsewhere])
    apart: tuple[str, ...] = (f"{names} {verb(len(elsewhere), 'be')} not in the call in which the others wait",)
    kinds = {_kind_of(rank) for rank in elsewhere}
    if len(kinds) > 1 or HangKind.WORKS in kinds:
        works = [rank for rank in elsewhere if _kind_of(rank) is HangKind.WORKS] or elsewhere
        return _hang(HangKind.WORKS, works, waiting, apart, compared)
    if compared is not None:
        apart = (_not_come(absent, compared),) if absent == elsewhere else ()
    (kind,) = kinds
    return _hang(kind, elsewhere, waiting, (*apart, sign_of(kind, names)), compared)


def _together(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Those that sleep in the same call, if they are most: they may wait for something that has no name, a handle of a
    collective or a device."""
    place, most = Counter(rank.place for rank in ranks).most_common(1)[0]
    together = [rank for rank in ranks if rank.place == place and rank.sleeps]
    return together if len(together) == most and 2 * most > len(ranks) else []


def _compare_waiting(waiting: Sequence[_Rank], compared: Comparison | None, absent: Sequence[_Rank]) -> Hang:
    """Compares ranks that all wait in collectives: if in different ones, none of them can continue."""
    places = Counter(rank.place for rank in waiting).most_common()
    most, size = places[0]
    apart = [rank for rank in waiting if rank.place != most]
    if compared is not None:
        # What the recorder says of the collectives is more than their lines: a branch may call the same one.
        if not absent:
            return _hang(HangKind.ALIKE, (), waiting, (), compared)
        signs = (_not_come(absent, compared),)
        if apart and apart != absent:
            return _hang(HangKind.MISMATCH, absent, _others(waiting, absent), signs, compared)
        apart, known = list(absent), 2 * len(absent) < len(waiting)
    elif not apart:
        return _hang(HangKind.ALIKE, (), waiting, ())
    else:
        # Half of the ranks against the other half: it is unknown which of them are wrong.
        known = len(apart) < size
        calls = " and ".join(dict.fromkeys(place[0] for place, _ in places[:2]))
        lines = len({place[1:] for place, _ in places})
        signs = (f"all ranks wait in collectives, and in {lines} different lines of the script ({calls})",)
    if all(rank.sleeps for rank in waiting):
        signs = (*signs, "no rank used a processor or left its call between the looks")
    elif all(rank.stays for rank in waiting):
        signs = (*signs, _ALL_STAYED)
    hang = _hang(HangKind.MISMATCH, apart, _others(waiting, apart), signs, compared)
    return hang if known else hang.replace(node=None, ranks=())


def _not_come(absent: Sequence[_Rank], compared: Comparison) -> str:
    names, have = rank_names([rank.seen.rank for rank in absent]), verb(len(absent), "have")
    awaited = collectives.words(compared.awaited) if compared.awaited is not None else "a collective"
    return f"{names} {have} not come to {awaited}, in which the others wait"


def _kind_of(rank: _Rank) -> HangKind:
    """What a rank does that others wait for."""
    if not rank.seen.steady or rank.seen.transfers:
        return HangKind.WORKS
    inner = next((call for call in rank.calls if call.of_library), None)
    if inner is not None and inner is rank.calls[0] and any(_DATA_LOADER in call.file for call in rank.calls):
        # An item may take its time once; a loader is no quicker to judge than anything else.
        return HangKind.DATA_LOADER if rank.long and rank.cpu < _NOTHING else HangKind.WORKS
    if not rank.long or rank.may_take_long or rank.in_package:
        return HangKind.WORKS
    sleeps_blocked = rank.silent and rank.seen.state == "S"
    if inner is not None and inner is rank.calls[0] and rank.computes and not sleeps_blocked:
        # One call of the standard library or of torch, whose places nobody sees, may compute for long. One that sleeps
        # while no thread of Perdure's gets the interpreter waits for a thread that keeps it.
        return HangKind.WORKS
    if rank.seen.state == "S" and _does_nothing(rank):
        return HangKind.ASLEEP
    if rank.seen.runs:
        return HangKind.LOOP
    # On a busy machine the thread that keeps the interpreter gets little of a processor.
    blocked = rank.silent or (rank.seen.state == "S" and rank.cpu >= _BUSY)
    return HangKind.INTERPRETER if blocked else HangKind.WORKS


def _does_nothing(rank: _Rank) -> bool:
    return rank.seen.steady and not rank.seen.moved and not rank.seen.transfers and rank.cpu < _NOTHING


def _hang(
    kind: HangKind,
    culprits: Sequence[_Rank],
    waiting: Sequence[_Rank],
    signs: Sequence[str],
    compared: Comparison | None = None,
) -> Hang:
    waiting = [rank for rank in waiting if rank.waits_in] or waiting
    nodes = {rank.node for rank in culprits}
    first = culprits[0] if culprits else None
    return Hang(
        kind=kind,
        node=nodes.pop() if len(nodes) == 1 else None,
        ranks=tuple(rank.seen.rank for rank in culprits),
        at=_line(first.own_call) if first is not None else "",
        stack=first.calls if first is not None else (),
        waiting=tuple(rank.seen.rank for rank in waiting),
        waits=len(waiting),
        waits_in=_waits_in(waiting[0]) if waiting else "",
        collective=compared.awaited if compared is not None else None,
        signs=tuple(signs),
    )


def _calls(look: StallLook, rank: StalledRank) -> tuple[StackFrame, ...]:
    known = rank.stack is not None and 0 <= rank.stack < len(look.stacks)
    return look.stacks[rank.stack or 0] if known else ()


def _collectives(look: StallLook, rank: StalledRank) -> tuple[CollectiveCall, ...]:
    return tuple(look.collectives[number] for number in rank.collectives if 0 <= number < len(look.collectives))


def _others(ranks: Sequence[_Rank], some: Sequence[_Rank]) -> list[_Rank]:
    known = set(some)
    return [rank for rank in ranks if rank not in known]


def _waits_in(rank: _Rank) -> str:
    return ", ".join(part for part in (rank.waits_in, _line(rank.own_call)) if part)


def _line(call: StackFrame | None) -> str:
    return f"{call.function}, {call.file}:{call.line}" if call is not None else ""


def _stack(hang: Hang) -> str:
    return "\n".join(f"{call.function}  {call.file}:{call.line}" for call in reversed(hang.stack))


def _stem(file: str) -> str:
    return file.rpartition("/")[2].rpartition(".")[0].lower()
