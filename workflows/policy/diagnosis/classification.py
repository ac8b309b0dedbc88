"""The class of what a node reports, by exit codes, signals and error texts.

The first node to report is not necessarily the culprit. When one rank dies, its peers fail within milliseconds with
connection errors, and often report first. Those are victims, and a victim decides nothing while a culprit may still
report.
"""

from __future__ import annotations

from collections.abc import Iterable

from perdure.contract import EvidenceSource, Failure, FailureClass, FailureKind, RankExit
from perdure.contract.agents import UNKNOWN_RANK
from perdure.spec.signals import signal_name
from perdure.workflows.policy.diagnosis.error_texts import (
    cannot_run,
    is_child_lost,
    is_collective_timeout,
    is_device_fault,
    is_device_missing,
    is_hardware,
    is_network,
    is_of_a_device,
    is_out_of_memory,
    is_peer_lost,
    is_storage,
    is_unequal,
)
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES, VICTIMS
from perdure.workflows.policy.diagnosis.raised_errors import raised_at
from perdure.workflows.policy.state.node import NodeFailure, RanOut

SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGSEGV, SIGTERM = 4, 6, 7, 8, 9, 11, 15
_CRASH_SIGNALS = frozenset({SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV})

_ENDING_SIGNALS = _CRASH_SIGNALS | {1, 2, 3, SIGKILL, SIGTERM, 24, 25}
"""Signals with which people, kernels and clusters end processes."""

_PASSED_ON = _CRASH_SIGNALS | {SIGKILL, SIGTERM}
"""Signals that a launcher in Python passes on as `sys.exit(-n)`. `sys.exit(-1)` and its like are a program's own."""

_TIMEOUT = 124
"""The exit code of `timeout` once it has ended its command."""


def signal_in_shell(exit_code: int | None) -> int | None:
    """The signal that ended the child of a shell or of another launcher, if its exit code indicates one: a shell then
    exits with 128 + n, and a launcher in Python that passes on its child's status with 256 - n.

    Only signals that end processes from outside or for a crash count; any other code may be the program's own.
    """
    number = (exit_code or 0) - 128
    if number in _ENDING_SIGNALS:
        return number
    passed_on = 256 - (exit_code or 0)
    return passed_on if passed_on in _PASSED_ON else None


def classify_rank(exit: RankExit, *, out_of_memory: bool = False, before_steps: bool = False) -> FailureClass:
    """Classifies one rank's exit; `before_steps` is as in `classify`."""
    text = exit.error or ""
    number = exit.signal
    if number is None and not text:
        number = signal_in_shell(exit.exit_code)
    if number in (SIGKILL, SIGTERM):
        return FailureClass.OUT_OF_MEMORY if out_of_memory and number == SIGKILL else FailureClass.KILLED
    if is_hardware(text) or (is_device_missing(text) and not before_steps):
        return FailureClass.HARDWARE
    if is_out_of_memory(text) or (out_of_memory and is_child_lost(text)):
        return FailureClass.DEVICE_OUT_OF_MEMORY if is_of_a_device(text) else FailureClass.OUT_OF_MEMORY
    if is_device_fault(text):
        return FailureClass.DEVICE_FAULT
    if is_network(text):
        return FailureClass.NETWORK
    if is_collective_timeout(text):
        return FailureClass.COLLECTIVE_TIMEOUT
    if is_peer_lost(text):
        return FailureClass.PEER_LOST
    if is_storage(text):
        return FailureClass.STORAGE
    if number in _CRASH_SIGNALS and not is_unequal(text):
        return FailureClass.CRASH
    return FailureClass.CANNOT_RUN if before_steps and cannot_run(text) else FailureClass.USER_CODE


def classify(failure: Failure, *, before_steps: bool = False) -> tuple[FailureClass, str, int | None]:
    """Classifies a node's report.

    Args:
        failure: The agent's report.
        before_steps: No rank of the job has made a step yet.

    Returns:
        The class, one line for people, and the exit code that led to the class (None where a signal did).
    """
    if failure.kind is FailureKind.UNPROTECTED:
        return FailureClass.UNPROTECTED, failure.message or "ranks started without Perdure's rendezvous", None
    if failure.kind is FailureKind.NODE:
        # What ends nodes on purpose sends SIGTERM. If another reason ended this one, its backend reports it.
        return FailureClass.DISRUPTED, failure.message or "the node was ended from outside", None
    if failure.kind is FailureKind.RENDEZVOUS:
        return FailureClass.RENDEZVOUS_TIMEOUT, failure.message or "it did not enter its world in time", None
    if failure.ranks:
        worst, exit = _speaking_rank(failure, before_steps=before_steps)
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
    number = signal_in_shell(failure.exit_code)
    if number is not None:
        # A program may choose such a code itself, so the text says that this is an inference.
        said = failure.message or f"the command exited with {failure.exit_code}"
        return (
            FailureClass.OUT_OF_MEMORY if failure.out_of_memory else FailureClass.COMMAND_LOST,
            f"{said}, as {_who_passes_on(failure.exit_code)} does when {signal_name(number)} ended its child",
            failure.exit_code,
        )
    if failure.exit_code == 0:
        return FailureClass.COMMAND_LOST, failure.message or "the command ended although its world continues", 0
    said = failure.message or f"the command exited with {failure.exit_code}"
    said = f"{said}: {failure.error}" if failure.error else said
    if failure.error:
        as_of_rank = RankExit(local_rank=UNKNOWN_RANK, exit_code=failure.exit_code, error=failure.error)
        found = classify_rank(as_of_rank, out_of_memory=failure.out_of_memory, before_steps=before_steps)
        return FailureClass.USER_CODE if found in VICTIMS else found, said, failure.exit_code
    return FailureClass.USER_CODE, said, failure.exit_code


def _speaking_rank(failure: Failure, *, before_steps: bool) -> tuple[FailureClass, RankExit]:
    """The rank that determines the class of its node's failure, which has ranks, and that class."""
    oom = failure.out_of_memory
    classes = [(classify_rank(exit, out_of_memory=oom, before_steps=before_steps), exit) for exit in failure.ranks]
    return min(classes, key=lambda pair: FAILURE_CLASSES[pair[0]].among_ranks)


def node_failure(failure: Failure, *, before_steps: bool = False) -> NodeFailure:
    """Returns what a node's report says about its failure; the arguments are those of `classify`."""
    failure_class, text, exit_code = classify(failure, before_steps=before_steps)
    ended = _speaking_rank(failure, before_steps=before_steps)[1] if failure.ranks else failure
    certain = not (failure_class is FailureClass.USER_CODE and not any(rank.error for rank in failure.ranks))
    killed_for_memory = failure.out_of_memory and failure_class is FailureClass.OUT_OF_MEMORY
    if killed_for_memory:
        text = f"{text}: {_describe_memory_kill(failure.memory_limit)}"
    # The backend knows why a node ends, and reports it a moment later.
    certain = (certain or failure.kind is not FailureKind.RANKS) and failure.kind not in (
        FailureKind.NODE,
        FailureKind.UNKNOWN,
    )
    return NodeFailure(
        rank=failure.sender.rank,
        failure=failure_class,
        time=failure.time,
        # A victim reports what it saw of its peers.
        source=EvidenceSource.PEERS if failure_class in VICTIMS else EvidenceSource.AGENT,
        exit_code=exit_code,
        signal=ended.signal if ended.signal is not None else signal_in_shell(ended.exit_code),
        text=text,
        raised_at=raised_at(ended.error, ended.traceback) if isinstance(ended, RankExit) else "",
        matches=failure.matches,
        log_tail=failure.log_tail or next((rank.traceback or "" for rank in failure.ranks), ""),
        certain=certain,
        as_of_timeout=_TIMEOUT in (failure.exit_code, *(rank.exit_code for rank in failure.ranks)),
        ranks=tuple(rank.global_rank for rank in failure.ranks if rank.global_rank is not None),
        ran_out=RanOut(limit=failure.memory_limit) if killed_for_memory else None,
    )


def _describe_memory_kill(limit: int | None) -> str:
    """Describes a kill that the memory controller counted, for people who only see a signal."""
    if limit is None:
        return "the kernel killed it because the memory of its machine ran out"
    size = f"{limit / 2**30:,.1f} GiB" if limit >= 10 * 2**30 else f"{limit / 2**20:,.0f} MiB"
    return f"the kernel killed it because its container's memory ran out; the limit is {size}"


def failed_by_themselves(failures: Iterable[NodeFailure]) -> frozenset[int]:
    """Returns the nodes whose failure is certainly their own, not the effect of another node's."""
    return frozenset(
        failure.rank
        for failure in failures
        if failure.certain and failure.failure not in VICTIMS and not is_unequal(failure.text)
    )


def describe_rank(exit: RankExit) -> str:
    """Describes a rank's exit: `rank 3 SIGSEGV` or `rank 3 exit code 1: ValueError: …`."""
    if exit.global_rank is not None:
        rank: int | str = exit.global_rank
    else:
        rank = "(unknown)" if exit.local_rank == UNKNOWN_RANK else f"(local {exit.local_rank})"
    how = signal_name(exit.signal) if exit.signal is not None else f"exit code {exit.exit_code}"
    if exit.error:
        return f"rank {rank} {how}: {exit.error}"
    number = signal_in_shell(exit.exit_code)
    passes_on = _who_passes_on(exit.exit_code)
    return f"rank {rank} {how}" + (f", as of {passes_on} whose child got {signal_name(number)}" if number else "")


def _who_passes_on(exit_code: int | None) -> str:
    return "a shell" if (exit_code or 0) - 128 in _ENDING_SIGNALS else "a launcher"
