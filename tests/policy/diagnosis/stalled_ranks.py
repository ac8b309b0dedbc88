"""Ranks that make no step, as several looks of their nodes show them."""

from __future__ import annotations

from typing import Any

from perdure.contract import CollectiveCall, Hang, Member, StackFrame, StalledRank, StallLook
from perdure.workflows.policy.diagnosis import hangs
from tests.policy.scenario import START

SITE = "/usr/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch/distributed/distributed_c10d.py"


def frame(function: str, line: int = 1, file: str = "/job/train.py") -> StackFrame:
    return StackFrame(function=function, file=file, line=line)


MAIN = frame("main", 26)
ALL_REDUCE = (frame("all_reduce", 3018, TORCH), frame("wrapper", 83, f"{SITE}/torch/distributed/c10d_logger.py"), MAIN)
BARRIER = (frame("barrier", 5000, TORCH), frame("main", 44))
BACKWARD = (frame("_engine_run_backward", 1113, f"{SITE}/torch/autograd/graph.py"), MAIN)
HANDLE = (frame("main", 31),)
LOCK = (frame("wait", 355, "/usr/lib/python3.11/threading.py"), frame("exchange", 12), frame("main", 25))
LOADER = (
    frame("poll", 936, "/usr/lib/python3.11/selectors.py"),
    frame("_try_get_data", 1275, f"{SITE}/torch/utils/data/dataloader.py"),
    frame("main", 24),
)
LOOP = (frame("until_converged", 7), frame("main", 25))
CHILD = (frame("_wait", 2011, "/usr/lib/python3.11/subprocess.py"), frame("publish", 9), frame("main", 25))
EVALUATION = (frame("sleep_like", 3), frame("evaluate", 60), frame("main", 70))


def call(number: int, name: str = "all_reduce", size: int = 4, *, group: str = "0 (default_pg)") -> CollectiveCall:
    """A collective in which a rank waits."""
    return CollectiveCall(
        group=group, sequence=number, name=f"gloo:{name}", sizes=str(size), elements=size, ended=False
    )


def sleeps(calls: tuple[StackFrame, ...], **seen: Any) -> dict[str, Any]:
    return {"calls": calls, "state": "S", "steady": True, "moved": False, "cpu_percent": 0.2, **seen}


def computes(calls: tuple[StackFrame, ...], **seen: Any) -> dict[str, Any]:
    return {"calls": calls, "state": "R", "steady": True, "moved": True, "runs": True, "cpu_percent": 15.0, **seen}


STOPPED: dict[str, Any] = {"calls": (), "state": "T", "steady": True, "moved": False, "cpu_percent": 0.0}
IN_KERNEL: dict[str, Any] = {"calls": (), "state": "D", "steady": True, "moved": False, "cpu_percent": 0.0}
WAITS = sleeps(ALL_REDUCE)
REDUCES = "all_reduce, main, /job/train.py:26"


def look(*ranks: dict[str, Any], first: int = 0, **fields: Any) -> StallLook:
    stacks: list[tuple[StackFrame, ...]] = []
    collectives: list[CollectiveCall] = []
    seen: list[StalledRank] = []
    for number, rank in enumerate(ranks, first):
        facts = dict(rank)
        calls = facts.pop("calls")
        if calls and calls not in stacks:
            stacks.append(calls)
        own = facts.pop("collectives", ())
        collectives += [one for one in own if one not in collectives]
        indices = tuple(map(collectives.index, own))
        seen.append(
            StalledRank(rank=number, stack=stacks.index(calls) if calls else None, collectives=indices, **facts)
        )
    known: dict[str, Any] = {"generation": 1, "since": START, "taken_at": START, "usual_steps": 150, "long": True}
    known |= fields
    return StallLook(ranks=tuple(seen), stacks=tuple(stacks), collectives=tuple(collectives), **known)


def found(*ranks: dict[str, Any], **fields: Any) -> Hang | None:
    """What is found where each node has one rank."""
    looks = {number: look(rank, first=number, **fields) for number, rank in enumerate(ranks)}
    members = {
        number: Member(incarnation=1, group_rank=number, base_rank=number, processes=1) for number in range(len(ranks))
    }
    return hangs.find(looks, members)
