"""Where ranks are while no step is made, as their agents report it, and what a job finds in it: who hangs.

A job keeps these in its state, for each of a thousand nodes, so every list and text has a limit.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from perdure.contract.agents import AgentMessage, Progress
from perdure.contract.base import Message, ShortText, Time, Vocabulary, shorten
from perdure.contract.routes import Destination, Route
from perdure.contract.stacks import CollectiveCall, StackFrame

__all__ = ["Hang", "HangKind", "StallEvidence", "StallLook", "StalledRank"]

MOST_RANKS = 64
"""Ranks of one node in a look: far more than a machine has devices."""
MOST_STACKS = 4
"""Different stacks of one node: ranks that wait for each other share theirs."""
MOST_FRAMES = 10
MOST_COLLECTIVES = 16
"""Different collectives of one node: ranks in the same one share it."""
_LONGEST_NAME = 80
"""Characters of a file's path and of a function's name. A longer path keeps its end."""


def _short(frame: StackFrame) -> StackFrame:
    return StackFrame(
        function=shorten(frame.function, _LONGEST_NAME), file=frame.file[-_LONGEST_NAME:], line=frame.line
    )


Frames = Annotated[
    tuple[StackFrame, ...], AfterValidator(lambda frames: tuple(_short(frame) for frame in frames[:MOST_FRAMES]))
]
RankNumbers = Annotated[tuple[int, ...], AfterValidator(lambda ranks: ranks[:MOST_RANKS])]


class StalledRank(Message):
    """What several looks at one rank have shown, during one stall."""

    rank: int
    """The global rank."""
    state: Annotated[str, AfterValidator(lambda state: state[:1])] = ""
    """The kernel's letter for the state of its main thread at the last look, as in `RankPosition`."""
    steady: bool = False
    """Each look has shown the same calls, or a process that is stopped or sleeps in the kernel."""
    runs: bool = False
    """Each look has found its main thread running, or ready to run."""
    moved: bool = True
    """Its main thread ran between the looks, or it is not known that it did not."""
    transfers: bool = False
    """It or a descendant read or wrote files between the looks."""
    cpu_percent: float | None = None
    """Use of processors from the first look to the last, by it and its descendants; 100 for one whole processor."""
    silent: bool = False
    """It told its collectives at no look: its torch does not record them, or its interpreter is blocked."""
    stack: int | None = None
    """The index of its main thread's calls among the look's stacks; None where it did not answer."""
    collectives: tuple[int, ...] = ()
    """The indices of the collectives in which it was at each look, one for each process group, among the look's
    collectives; empty where they are unknown or have changed."""


class StallLook(Message):
    """Where the ranks of one node are while none of them steps."""

    generation: int
    since: Time
    """The time of the last step."""
    taken_at: Time
    """The time of the look."""
    usual_steps: int = 0
    """The number of usual steps that would have been made since."""
    ranks: Annotated[tuple[StalledRank, ...], AfterValidator(lambda ranks: ranks[:MOST_RANKS])] = ()
    stacks: Annotated[tuple[Frames, ...], AfterValidator(lambda stacks: stacks[:MOST_STACKS])] = ()
    """Different calls of main threads, the innermost first: the innermost of all, and the innermost of the script."""
    collectives: Annotated[
        tuple[CollectiveCall, ...], AfterValidator(lambda collectives: collectives[:MOST_COLLECTIVES])
    ] = ()
    """Different collectives of the ranks, as torch's flight recorder tells them."""
    progress: Progress | None = None
    """The progress of the node's ranks before the stall."""
    early: bool = False
    """The stall is not longer than a pause of this job may be: only what no pause explains means anything, a process
    that is stopped, or ranks that wait for each other in different collectives."""
    unusual: bool = False
    """The stall is far longer than the gaps between the node's steps, and not longer than a first evaluation may be:
    a storage that does not answer may do so again."""
    long: bool = False
    """The stall is much longer than any pause of this job: `timing.stall.elsewhere`."""


class StallEvidence(AgentMessage, route=Route(Destination.GROUP, "stall_evidence", newest_only=True, spread=True)):
    """Where the ranks of a node are that was reported as stalled."""

    look: StallLook


class HangKind(Vocabulary):
    """Kinds of hangs that can be told apart from outside."""

    STOPPED = "STOPPED"
    """A process was stopped (SIGSTOP) and does not continue."""
    KERNEL = "KERNEL"
    """A process sleeps in the kernel, where no signal reaches it: a mount or a driver does not answer."""
    MISMATCH = "MISMATCH"
    """All ranks wait for each other, in different calls: one has left out a collective, or called another one."""
    DATA_LOADER = "DATA_LOADER"
    """A rank waits for workers of its data loader that do nothing."""
    ASLEEP = "ASLEEP"
    """A rank sleeps outside of the collective in which the others wait for it: a lock, a connection, a device."""
    LOOP = "LOOP"
    """A rank computes in the same calls, outside of the collective in which the others wait for it."""
    INTERPRETER = "INTERPRETER"
    """A rank's main thread waits, and another thread of it computes and may keep the interpreter."""
    WORKS = "WORKS"
    """A rank does something else while the others wait for it, and nothing shows that it will not end: no hang."""
    ALIKE = "ALIKE"
    """All ranks wait in the same call: for a network, a storage or a device. None of them is known to hang."""
    DEBUGGED = "DEBUGGED"
    """A debugger is attached to a rank: a user looks."""
    UNKNOWN = "UNKNOWN"
    """A kind that only a newer release knows."""


class Hang(Message):
    """What the looks at all ranks show together: who hangs, where, and who waits."""

    kind: HangKind
    node: int | None = None
    """The node (slot) with the ranks that others wait for; None where there is not exactly one."""
    incarnation: int = 0
    """The incarnation of that node."""
    ranks: RankNumbers = ()
    """The global ranks that others wait for."""
    at: ShortText = ""
    """The call of the script in which they are."""
    stack: Frames = ()
    """The calls of the first of these ranks, the innermost first."""
    waiting: RankNumbers = ()
    """The first of the ranks that wait."""
    waits: int = 0
    """How many ranks wait."""
    waits_in: ShortText = ""
    """The call in which they wait."""
    collective: CollectiveCall | None = None
    """The collective in which they wait; None where torch's flight recorder does not tell it."""
    signs: tuple[ShortText, ...] = ()
    """Independent signs that these ranks hang. A job acts on two."""
