"""Classifies failures: one table from facts (exit codes, signals, error texts) to a class.

The first node to report is not necessarily the culprit. When one rank dies, its peers fail within milliseconds with
connection errors, and often report first. Those are victims, and a victim decides nothing while a culprit may still
report.
"""

from __future__ import annotations

import re

from workflows.messages import Failure, FailureClass, FailureKind, RankExit
from workflows.policy.failure_classes import FAILURE_CLASSES

SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGSEGV, SIGTERM = 4, 6, 7, 8, 9, 11, 15
_CRASH_SIGNALS = frozenset({SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV})

_ENDING_SIGNALS = _CRASH_SIGNALS | {1, 2, 3, SIGKILL, SIGTERM, 24, 25}
"""Signals with which people, kernels and clusters end processes."""

_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed"
    r"|remote (process|peer) (exited|closed)|connectfullmesh|gloo.*(timed out|timeout|recvbuf|transport)"
    r"|nccl.*(remote error|watchdog|aborted|timeout)|watchdog (caught|got)|processgroupnccl.*(abort|timeout)"
    r"|distnetworkerror|diststoreerror|heartbeat.*timed? ?out",
    re.IGNORECASE | re.DOTALL,
)
"""Errors of torch's gloo and NCCL backends and of its stores after another process has gone."""

_UNEQUAL = re.compile(r"enforce fail at .*gloo.* vs ", re.IGNORECASE | re.DOTALL)
"""gloo's error when ranks bring tensors of different sizes to one collective, which is the script's own fault."""

_OUT_OF_MEMORY = re.compile(r"out of memory|outofmemoryerror|cannot allocate memory|\bmemoryerror\b", re.IGNORECASE)


def signal_in_shell(exit_code: int | None) -> int | None:
    """The signal that ended a shell's child, if the shell's exit code indicates one: a shell then exits with 128 + n.

    Only signals that end processes from outside or for a crash count; any other code may be the program's own.
    """
    number = (exit_code or 0) - 128
    return number if number in _ENDING_SIGNALS else None


def classify_rank(exit: RankExit, *, out_of_memory: bool = False, shells: bool = True) -> FailureClass:
    """Classifies one rank's exit; `shells` is as in `classify`."""
    text = exit.error or ""
    number = exit.signal
    if number is None and not text and shells:
        number = signal_in_shell(exit.exit_code)
    if number in (SIGKILL, SIGTERM):
        return FailureClass.OUT_OF_MEMORY if out_of_memory and number == SIGKILL else FailureClass.KILLED
    if _OUT_OF_MEMORY.search(text):
        return FailureClass.OUT_OF_MEMORY
    if _PEER_LOST.search(text) and not _UNEQUAL.search(text):
        return FailureClass.PEER_LOST
    if number in _CRASH_SIGNALS:
        return FailureClass.CRASH
    return FailureClass.USER_CODE


def classify(failure: Failure, *, shells: bool = True) -> tuple[FailureClass, str, int | None]:
    """Classifies a node's report.

    Args:
        failure: The agent's report.
        shells: Read an exit code of 128 + n as the end of a shell's child by signal n.

    Returns:
        The class, one line for people, and the exit code that led to the class (None where a signal did).
    """
    if failure.kind is FailureKind.UNPROTECTED:
        return FailureClass.UNPROTECTED, failure.message or "ranks started without Perdure's rendezvous", None
    if failure.kind is FailureKind.NODE:
        return FailureClass.NODE_LOST, failure.message or "the node was ended from outside", None
    if failure.kind is FailureKind.RENDEZVOUS:
        return FailureClass.RENDEZVOUS_TIMEOUT, failure.message or "it did not enter its world in time", None
    if failure.ranks:
        oom = failure.out_of_memory
        classes = [(classify_rank(exit, out_of_memory=oom, shells=shells), exit) for exit in failure.ranks]
        worst, exit = min(classes, key=lambda pair: FAILURE_CLASSES[pair[0]].among_ranks)
        return worst, describe_rank(exit), exit.exit_code
    if failure.kind is FailureKind.RANKS:
        return FailureClass.PEER_LOST, failure.message or "the ranks ended without an error", failure.exit_code
    if failure.kind is FailureKind.UNKNOWN and failure.exit_code is None and failure.signal is None:
        text = failure.message or "its agent, of a newer release, reports a failure that this worker does not know"
        return FailureClass.UNKNOWN, text, None
    if failure.exit_code in (126, 127):
        return FailureClass.LAUNCH, failure.message or "the command could not be started", failure.exit_code
    if failure.signal is not None:
        return (
            FailureClass.OUT_OF_MEMORY if failure.out_of_memory else FailureClass.COMMAND_LOST,
            failure.message or f"the command was ended by {signal_name(failure.signal)}",
            None,
        )
    if shells and (number := signal_in_shell(failure.exit_code)) is not None:
        # A program may choose such a code itself, so the text says that this is an inference.
        said = failure.message or f"the command exited with {failure.exit_code}"
        return (
            FailureClass.OUT_OF_MEMORY if failure.out_of_memory else FailureClass.COMMAND_LOST,
            f"{said}, as a shell does when {signal_name(number)} ended its child",
            failure.exit_code,
        )
    if failure.exit_code == 0:
        return FailureClass.COMMAND_LOST, failure.message or "the command ended although its world continues", 0
    return FailureClass.USER_CODE, failure.message or f"the command exited with {failure.exit_code}", failure.exit_code


def describe_rank(exit: RankExit) -> str:
    """Describes a rank's exit: `rank 3 SIGSEGV` or `rank 3 exit code 1: ValueError: …`."""
    rank = exit.global_rank if exit.global_rank is not None else f"(local {exit.local_rank})"
    how = signal_name(exit.signal) if exit.signal is not None else f"exit code {exit.exit_code}"
    if exit.error:
        return f"rank {rank} {how}: {exit.error}"
    number = signal_in_shell(exit.exit_code)
    return f"rank {rank} {how}" + (f", as of a shell whose child got {signal_name(number)}" if number else "")


def signal_name(number: int) -> str:
    """The signal's name on Linux. The names are listed here because they differ by platform, and a replay must not."""
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
