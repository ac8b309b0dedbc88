"""The meaning of each failure class, for the policy and for people: one table that every decision and every text reads.

A new class is a member of `FailureClass` and an entry here. A class without an entry fails at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workflows.messages import FailureClass

_READ_LOGS = "perdure logs {job}{flag}{node} --tail 50"
_WATCH_NODES = "nothing to do, unless it repeats; perdure nodes {job}{flag}"


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
class Stop:
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
    users_own: bool = False
    """Users' own failure: it will probably happen again, so it counts against progress, and the job exits with 1."""
    victim: bool = False
    """The effect of another node's failure: it decides nothing while a culprit may still report."""
    took_part: bool = True
    """The node may have run in the world that it accepted; otherwise it never entered, or left without a report."""
    among_ranks: int = 100
    """The priority among several failed ranks: the rank with the lowest number determines the node's class. torchrun
    itself may have killed a rank. Classes that no rank ends with keep the default."""
    give_up: GiveUp | None = None
    stop: Stop | None = None


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
        FailureClass.CREATE_FAILED: FailureTraits(
            meaning="the node could not be created",
            advice=_WATCH_NODES,
            stop=Stop(rule='refused/1 "the backend will never create this node"', exit_code=3),
        ),
        FailureClass.UNPROTECTED: FailureTraits(
            meaning="ranks ran without Perdure's rendezvous",
            advice=_READ_LOGS,
            users_own=True,
            stop=Stop(rule='unprotected/1 "ranks that the job has not placed: stop"', exit_code=2),
        ),
        FailureClass.LAUNCH: FailureTraits(
            meaning="the command could not be started",
            advice=_READ_LOGS,
            users_own=True,
            stop=Stop(rule='launch/1 "it will not start the next time either"', exit_code=1),
        ),
        FailureClass.OUT_OF_MEMORY: FailureTraits(
            meaning="memory ran out", advice=_READ_LOGS, users_own=True, among_ranks=0
        ),
        FailureClass.CRASH: FailureTraits(
            meaning="a rank crashed in native code", advice=_READ_LOGS, users_own=True, among_ranks=1
        ),
        FailureClass.COMMAND_LOST: FailureTraits(
            meaning="the command itself was ended, and none of its ranks had failed", advice=_READ_LOGS
        ),
        FailureClass.KILLED: FailureTraits(
            meaning="a rank was killed from outside", advice=_WATCH_NODES, among_ranks=3
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
            users_own=True,
            among_ranks=2,
        ),
        FailureClass.UNKNOWN: FailureTraits(
            meaning="a kind of failure that this release does not know", advice=_WATCH_NODES
        ),
        FailureClass.PEER_LOST: FailureTraits(
            meaning="ranks failed because another one went away", advice=_WATCH_NODES, victim=True, among_ranks=4
        ),
    }
)
"""Causes before their effects: if several nodes report an interruption, the first class in this order names the
culprit."""

_PRECEDENCE = {failure: index for index, failure in enumerate(FAILURE_CLASSES)}

USERS_OWN = frozenset(failure for failure, traits in FAILURE_CLASSES.items() if traits.users_own)

NODE_FAILURES = frozenset(
    failure for failure, traits in FAILURE_CLASSES.items() if traits.give_up is not None and traits.give_up.at_once
)

VICTIMS = frozenset(failure for failure, traits in FAILURE_CLASSES.items() if traits.victim)


def precedence(failure: FailureClass) -> int:
    """The position of the class in the order of causes; among several reports, the lowest names the culprit."""
    return _PRECEDENCE[failure]
