"""What a failure means: one table from facts (exit codes, signals, error texts) to a class.

Not the first to report is the culprit. When one rank dies its peers fail within milliseconds with errors of their
connections, and often report first; those are victims, and a victim never decides while a culprit may still speak.
"""

from __future__ import annotations

import re

from workflows.messages import Failure, FailureClass, FailureKind, RankExit

SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGSEGV, SIGTERM = 4, 6, 7, 8, 9, 11, 15
_CRASH_SIGNALS = frozenset({SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV})

_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed"
    r"|remote (process|peer) (exited|closed)|connectfullmesh|gloo.*(timed out|timeout|recvbuf|transport)"
    r"|nccl.*(remote error|watchdog|aborted|timeout)|watchdog (caught|got)|processgroupnccl.*(abort|timeout)"
    r"|distnetworkerror|diststoreerror|heartbeat.*timed? ?out",
    re.IGNORECASE | re.DOTALL,
)
"""Texts of torch's gloo and NCCL backends and of its stores when another process went away."""

_UNEQUAL = re.compile(r"enforce fail at .*gloo.* vs ", re.IGNORECASE | re.DOTALL)
"""Gloo's text when ranks bring tensors of different sizes to one collective: the script's own doing."""

_OUT_OF_MEMORY = re.compile(r"out of memory|outofmemoryerror|cannot allocate memory|\bmemoryerror\b", re.IGNORECASE)

_SEVERITY = (
    FailureClass.OUT_OF_MEMORY,
    FailureClass.CRASH,
    FailureClass.USER_CODE,
    FailureClass.KILLED,
    FailureClass.PEER_LOST,
)
"""Which of several ranks of one node speaks for it: a rank that was killed may have been torchrun's own doing."""

USERS_OWN = frozenset(
    {
        FailureClass.USER_CODE,
        FailureClass.CRASH,
        FailureClass.LAUNCH,
        FailureClass.OUT_OF_MEMORY,
        FailureClass.UNPROTECTED,
    }
)
"""Likely to happen again by itself, so it counts against progress; the job's exit code is then 1."""


def classify_rank(exit: RankExit, *, out_of_memory: bool = False) -> FailureClass:
    """The class of one rank's end."""
    text = exit.error or ""
    if exit.signal in (SIGKILL, SIGTERM):
        return FailureClass.OUT_OF_MEMORY if out_of_memory and exit.signal == SIGKILL else FailureClass.KILLED
    if _OUT_OF_MEMORY.search(text):
        return FailureClass.OUT_OF_MEMORY
    if _PEER_LOST.search(text) and not _UNEQUAL.search(text):
        return FailureClass.PEER_LOST
    if exit.signal in _CRASH_SIGNALS:
        return FailureClass.CRASH
    return FailureClass.USER_CODE


def classify(failure: Failure) -> tuple[FailureClass, str, int | None]:
    """What a node's report means.

    Returns:
        The class, one line for people, and the exit code that speaks for it (None where a signal did).
    """
    if failure.kind is FailureKind.UNPROTECTED:
        return FailureClass.UNPROTECTED, failure.message or "ranks started outside of our rendezvous", None
    if failure.kind is FailureKind.NODE:
        return FailureClass.NODE_LOST, failure.message or "the node was ended from outside", None
    if failure.kind is FailureKind.RENDEZVOUS:
        return FailureClass.RENDEZVOUS_TIMEOUT, failure.message or "it did not enter its world in time", None
    if failure.ranks:
        classes = [(classify_rank(exit, out_of_memory=failure.out_of_memory), exit) for exit in failure.ranks]
        worst, exit = min(classes, key=lambda pair: _SEVERITY.index(pair[0]))
        return worst, describe_rank(exit), exit.exit_code
    if failure.kind is FailureKind.RANKS:
        return FailureClass.PEER_LOST, failure.message or "the ranks ended without a trace", failure.exit_code
    if failure.exit_code in (126, 127):
        return FailureClass.LAUNCH, failure.message or "the command could not be started", failure.exit_code
    if failure.signal is not None:
        return (
            FailureClass.OUT_OF_MEMORY if failure.out_of_memory else FailureClass.COMMAND_LOST,
            failure.message or f"the command was ended by {signal_name(failure.signal)}",
            None,
        )
    if failure.exit_code == 0:
        return FailureClass.COMMAND_LOST, failure.message or "the command left although its world goes on", 0
    return FailureClass.USER_CODE, failure.message or f"the command exited with {failure.exit_code}", failure.exit_code


def describe_rank(exit: RankExit) -> str:
    """`rank 3 SIGSEGV` or `rank 3 exit code 1: ValueError: …`."""
    rank = exit.global_rank if exit.global_rank is not None else f"(local {exit.local_rank})"
    how = signal_name(exit.signal) if exit.signal is not None else f"exit code {exit.exit_code}"
    return f"rank {rank} {how}" + (f": {exit.error}" if exit.error else "")


def signal_name(number: int) -> str:
    """The signal's name on Linux; spelled here because names differ by platform and a replay must not."""
    return _SIGNAL_NAMES.get(number, f"signal {number}")


_SIGNAL_NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
}
