"""Failures: what each class means.

One table holds the meaning of each class, for the policy and for people; every decision and every text reads it. A new
class is a member of `FailureClass` and an entry there. A class without an entry fails at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.contract import FailureClass

_READ_LOGS = "perdure logs {job}{flag}{node} --tail 50"
_WATCH_NODES = "nothing to do, unless it repeats; perdure nodes {job}{flag}"
_ON_PURPOSE = "nothing to do: it counts in no budget; perdure nodes {job}{flag}"
_START_AGAIN = "start the job again once the cause is gone; perdure nodes {job}{flag} shows what became of each node"
_CORRECT = "correct what perdure logs {job}{flag}{node} --tail 50 shows, and start the job again"
_CHANGE_REFUSAL = "change what refuses the node, which `perdure status {job}{flag}` names; then start the job again"
_LONGER_FIRST_STEP = (
    "perdure logs {job}{flag}{node} --tail 50; if the first step needs longer, set timing.stall.first_step"
)
_FIND_KERNEL = (
    "perdure logs {job}{flag}{node} --tail 50; CUDA_LAUNCH_BLOCKING=1 in the job's env makes the traceback end at the "
    "call that failed"
)
_USE_LESS_MEMORY = (
    "perdure logs {job}{flag}{node} --tail 50 says how much was in use; a smaller batch per rank, activation "
    "checkpointing or sharded parameters need less"
)
_MEND_STORAGE = "perdure logs {job}{flag}{node} --tail 50 names the file; free or mend what holds it"
_REACH_SERVER = "perdure logs {job}{flag}{node} --tail 50 names the server, which the nodes must reach"
_FIND_HANG = (
    "perdure logs {job}{flag}{node} --tail 50 shows what it did last; a shorter timeout in init_process_group() ends a "
    "hang sooner"
)
_FIND_NUMBER = (
    "perdure logs {job}{flag}{node} --tail 50; look at the samples of that step, if they are named, and at the "
    "learning rate"
)
_FIND_LINE = (
    "the calls below are those of the rank; perdure logs {job}{flag}{node} --tail 50; docs/hangs.md says how a hang is "
    "found, and recovery.on_hang: report only shows it"
)

_FOLLOW_SLOW_RANK = (
    "nothing to do; perdure nodes {job}{flag} -o json shows how the steps of each rank split, and "
    "recovery.on_straggler: report only shows a slow rank: docs/stragglers.md"
)
_COOL_DEVICE = (
    "have cooling and power supply of the machine checked; perdure nodes {job}{flag} -o json shows why the clocks of "
    "each GPU are reduced: docs/stragglers.md"
)
_CHECK_DEVICE = "have the processor, the GPU and the memory of the machine tested; perdure nodes {job}{flag}"


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Why the job gives a node up, and how an incident describes it."""

    what: str
    """The node's state, written after `node 3`."""
    why_not_in_place: str
    """Why its ranks cannot be restarted where they are."""
    at_once: bool
    """The first such failure gives the node up; otherwise its command is first started once more."""


@dataclass(frozen=True, kw_only=True)
class PermanentFailure:
    """Why a job stops at the first failure of a class."""

    rule: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class FailureTraits:
    """Everything that depends on a failure class alone."""

    meaning: str
    """One clause for people, without the node."""
    advice: str
    """The advice to the user; `{job}`, `{flag}` and `{node}` stand for the job and the options that name its place."""
    remedy: str = _START_AGAIN
    """The same, where the job has stopped because of it."""
    users_own: bool = False
    """Users' own failure: it will probably happen again, and the job exits with 1."""
    needs_progress: bool = False
    """It may happen again at the same step: a job that restarts for it again and again must make progress in between.
    That holds for users' own failures, too."""
    once_more: bool = False
    """The same again, with no step gained in between, is certain to come a third time: the job stops then."""
    recurs: bool = False
    """The same error at the same place, with no step gained in between, is certain to come a third time."""
    victim: bool = False
    """The effect of another node's failure: it decides nothing while a culprit may still report."""
    took_part: bool = True
    """The node may have run in the world that it accepted; otherwise it never entered, or left without a report."""
    among_ranks: int = 100
    """The priority among several failed ranks: the rank with the lowest number determines the node's class. torchrun
    itself may have killed a rank. Classes that no rank ends with keep the default."""
    give_up: GiveUp | None = None
    stop: PermanentFailure | None = None
    counts: bool = True
    """It uses up restarts. What a site does on purpose, however often, says nothing about the job."""


def complete(table: Mapping[FailureClass, FailureTraits]) -> Mapping[FailureClass, FailureTraits]:
    """Checks that every failure class has an entry, and returns the table.

    Raises:
        LookupError: if a class has no entry.
    """
    if missing := [failure for failure in FailureClass if failure not in table]:
        raise LookupError(f"failure classes without an entry: {', '.join(missing)}")
    return table


FAILURE_CLASSES = complete(
    {
        FailureClass.NODE_LOST: FailureTraits(
            meaning="the node was lost (infrastructure)",
            advice=_WATCH_NODES,
            give_up=GiveUp(what="lost", why_not_in_place="its processes are gone", at_once=True),
        ),
        FailureClass.EVICTED: FailureTraits(
            meaning="its machine ended the node for lack of memory or disk, which the job may have used",
            advice=_WATCH_NODES,
            give_up=GiveUp(what="evicted", why_not_in_place="its processes are gone", at_once=True),
        ),
        FailureClass.NODE_UNRESPONSIVE: FailureTraits(
            meaning="the node answered nothing while its world was stopped (infrastructure)",
            advice=_WATCH_NODES,
            took_part=False,
            give_up=GiveUp(
                what="unresponsive while its world is stopped",
                why_not_in_place="its agent does not take commands",
                at_once=True,
            ),
        ),
        FailureClass.DISRUPTED: FailureTraits(
            meaning="the node was ended on purpose: deleted, drained, evicted or preempted",
            advice=_ON_PURPOSE,
            give_up=GiveUp(what="disrupted", why_not_in_place="its processes are gone", at_once=True),
            counts=False,
        ),
        FailureClass.PREEMPTED: FailureTraits(
            meaning="the node made room for other work of a higher priority",
            advice=_ON_PURPOSE,
            give_up=GiveUp(what="preempted", why_not_in_place="its processes are gone", at_once=True),
            counts=False,
        ),
        FailureClass.CREATE_FAILED: FailureTraits(
            meaning="the node could not be created",
            advice=_CHANGE_REFUSAL,
            remedy=_CHANGE_REFUSAL,
            stop=PermanentFailure(rule='refused/1 "the first nodes are refused for good: stop"', exit_code=3),
        ),
        FailureClass.HARDWARE: FailureTraits(
            meaning="a GPU has failed or was lost, which only a reset or a repair of its machine ends (infrastructure)",
            advice="have the GPU of the machine checked; perdure nodes {job}{flag}",
            among_ranks=0,
            give_up=GiveUp(what="has a GPU that failed", why_not_in_place="its GPU cannot be used", at_once=True),
        ),
        FailureClass.CORRUPTION: FailureTraits(
            meaning="a device computes wrongly without an error: ranks that should have the same numbers have not",
            advice=_CHECK_DEVICE,
            remedy=_CHECK_DEVICE,
            needs_progress=True,
        ),
        FailureClass.UNPROTECTED: FailureTraits(
            meaning="ranks ran without Perdure's rendezvous",
            advice=_READ_LOGS,
            remedy=_CORRECT,
            users_own=True,
            stop=PermanentFailure(rule='unprotected/1 "ranks that the job has not placed: stop"', exit_code=2),
        ),
        FailureClass.LAUNCH: FailureTraits(
            meaning="the command could not be started",
            advice=_READ_LOGS,
            remedy=_CORRECT,
            users_own=True,
            stop=PermanentFailure(rule='launch/1 "it will not start the next time either"', exit_code=1),
        ),
        FailureClass.OUT_OF_MEMORY: FailureTraits(
            meaning="memory ran out", advice=_READ_LOGS, remedy=_CORRECT, users_own=True, once_more=True, among_ranks=1
        ),
        FailureClass.DEVICE_OUT_OF_MEMORY: FailureTraits(
            meaning="the memory of a GPU ran out",
            advice=_USE_LESS_MEMORY,
            remedy=_USE_LESS_MEMORY,
            users_own=True,
            once_more=True,
            among_ranks=2,
        ),
        FailureClass.NUMERIC: FailureTraits(
            meaning="a loss was not a finite number: the script's numbers, its data, or a device that computes wrongly",
            advice=_FIND_NUMBER,
            remedy=_FIND_NUMBER,
            users_own=True,
        ),
        FailureClass.DEVICE_FAULT: FailureTraits(
            meaning="a kernel failed on a GPU: an index out of range, an access to memory that is not its own, or a "
            "fault of the GPU",
            advice=_FIND_KERNEL,
            remedy=_FIND_KERNEL,
            users_own=True,
            recurs=True,
            among_ranks=3,
        ),
        FailureClass.CRASH: FailureTraits(
            meaning="a rank crashed in native code", advice=_READ_LOGS, remedy=_CORRECT, users_own=True, among_ranks=4
        ),
        FailureClass.STORAGE: FailureTraits(
            meaning="a disk, a mount or an object store that the script uses is full, away, or refuses requests",
            advice=_MEND_STORAGE,
            remedy=_MEND_STORAGE,
            users_own=True,
            among_ranks=5,
        ),
        FailureClass.NETWORK: FailureTraits(
            meaning="a server outside of the job that the script uses could not be reached, or could not answer",
            advice=_REACH_SERVER,
            remedy=_REACH_SERVER,
            users_own=True,
            among_ranks=6,
        ),
        FailureClass.CANNOT_RUN: FailureTraits(
            meaning="the script cannot run as it is: it failed before any step, by an error of its code or of what it "
            "needs",
            advice=_READ_LOGS,
            remedy=_CORRECT,
            users_own=True,
            once_more=True,
            among_ranks=7,
        ),
        FailureClass.COMMAND_LOST: FailureTraits(
            meaning="the command itself was ended, and none of its ranks had failed", advice=_READ_LOGS
        ),
        FailureClass.KILLED: FailureTraits(
            meaning="a rank was killed from outside", advice=_WATCH_NODES, among_ranks=9
        ),
        FailureClass.RENDEZVOUS_TIMEOUT: FailureTraits(
            meaning="a node did not enter the world in time",
            advice=_WATCH_NODES,
            took_part=False,
            give_up=GiveUp(
                what="did not enter two worlds in a row",
                why_not_in_place="its command was started again, and did not enter either",
                at_once=False,
            ),
        ),
        FailureClass.USER_CODE: FailureTraits(
            meaning="the script failed by itself; the same will probably happen again",
            advice=_READ_LOGS,
            remedy=_CORRECT,
            users_own=True,
            recurs=True,
            among_ranks=8,
        ),
        FailureClass.UNKNOWN: FailureTraits(
            meaning="a kind of failure that this release does not know", advice=_WATCH_NODES
        ),
        FailureClass.RANK_HANG: FailureTraits(
            meaning="a rank hangs, and the others wait for it",
            advice=_FIND_LINE,
            remedy=_FIND_LINE,
            needs_progress=True,
        ),
        FailureClass.HANG: FailureTraits(
            meaning="no rank made a first step in the time that the world had for it: a rank hangs, or the first step "
            "takes longer than ever before",
            advice=_LONGER_FIRST_STEP,
            remedy=_LONGER_FIRST_STEP,
            needs_progress=True,
        ),
        FailureClass.STRAGGLER: FailureTraits(
            meaning="a rank computes for longer than the others in each step, and they wait for it",
            advice=_FOLLOW_SLOW_RANK,
        ),
        FailureClass.THROTTLED: FailureTraits(
            meaning="the GPU of a rank runs with reduced clocks, and the other ranks wait for it in each step",
            advice=_COOL_DEVICE,
        ),
        FailureClass.COLLECTIVE_TIMEOUT: FailureTraits(
            meaning="ranks waited for another one until a timeout of torch ended them: one hangs, is much slower, or "
            "did not call the same collective",
            advice=_FIND_HANG,
            remedy=_FIND_HANG,
            victim=True,
            needs_progress=True,
            among_ranks=10,
        ),
        FailureClass.PEER_LOST: FailureTraits(
            meaning="ranks failed because another one went away", advice=_WATCH_NODES, victim=True, among_ranks=11
        ),
    }
)
"""Causes before their effects: if several nodes report an interruption, the first class in this order names the
culprit."""

_PRECEDENCE = {failure: index for index, failure in enumerate(FAILURE_CLASSES)}

USERS_OWN = frozenset(failure for failure, traits in FAILURE_CLASSES.items() if traits.users_own)

NEED_PROGRESS = USERS_OWN | {failure for failure, traits in FAILURE_CLASSES.items() if traits.needs_progress}

NODE_FAILURES = frozenset(
    failure for failure, traits in FAILURE_CLASSES.items() if traits.give_up is not None and traits.give_up.at_once
)

GONE = frozenset({FailureClass.NODE_LOST, FailureClass.EVICTED, FailureClass.DISRUPTED, FailureClass.PREEMPTED})
"""The failures of a node whose processes have ended with it."""

VICTIMS = frozenset(failure for failure, traits in FAILURE_CLASSES.items() if traits.victim)


def precedence(failure: FailureClass) -> int:
    """The position of the class in the order of causes; among several reports, the lowest names the culprit."""
    return _PRECEDENCE[failure]
