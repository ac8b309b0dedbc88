"""Where the ranks of a node are: the question to its agent, and the answer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from perdure.contract.base import Message, shorten
from perdure.contract.questions import Question

__all__ = ["CollectiveCall", "NodeStacks", "RankPosition", "ReadStacks", "StackFrame", "ThreadStack"]


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/perdure_launcher/")


class ReadStacks(Question):
    """Asks where a node's ranks are."""

    subject: ClassVar[str] = "stacks"
    activity: Literal["read_stacks"] = "read_stacks"


class StackFrame(Message):
    """One call that has not returned."""

    function: str
    file: str
    line: int

    @property
    def of_library(self) -> bool:
        """Whether it is the call of an installed package or of Python's own library, and not of a user's script."""
        return any(part in self.file for part in _LIBRARIES) or self.file.startswith("<frozen")


class ThreadStack(Message):
    """The calls of one Python thread, the innermost first."""

    frames: tuple[StackFrame, ...] = ()


_Name = Annotated[str, AfterValidator(lambda text: shorten(text, 80))]


class CollectiveCall(Message):
    """A collective that a rank has called, as torch's flight recorder tells it."""

    group: _Name
    """Its process group: the name that torch gives it, and what the script says of it."""
    sequence: int
    """Its number in the group, which is the same on all ranks."""
    name: _Name
    """What it is, such as `gloo:all_reduce`."""
    sizes: _Name = ""
    """The shapes of the rank's tensors, such as `8x4`."""
    elements: int = 0
    """The number of elements of these tensors."""
    ended: bool = True
    """False: the rank waits in it, or has started it and not waited for it yet."""

    @property
    def backend(self) -> str:
        """What carries it out, such as `gloo`. Each backend of a process group numbers its own collectives."""
        return self.name.partition(":")[0]

    @property
    def on_device(self) -> bool:
        """It runs on a device: the rank that has called it continues, and spins once it needs the result."""
        return self.backend == "nccl"


class RankPosition(Message):
    """Where one rank is."""

    rank: int
    """The global rank."""
    pid: int
    """In the namespace of its node."""
    generation: int = 0
    state: str = ""
    """The kernel's letter for the state of its main thread: R runs, S sleeps, D sleeps and takes no signal, T is
    stopped, t has a debugger attached."""
    cpu_percent: float | None = None
    """Its use of processors while it was asked; 100 for one whole processor."""
    cpu_seconds: float | None = None
    """Processor time that it and its living descendants have used since they began."""
    switches: int | None = None
    """How often its main thread had left a processor before it was asked."""
    transferred_bytes: int | None = None
    """What it and its living descendants have read from files and written to them."""
    threads: tuple[ThreadStack, ...] = ()
    """The main thread first."""
    collectives: tuple[CollectiveCall, ...] = ()
    """Where it is in each of its process groups: in the oldest collective that has not ended, or else after the newest.
    The group of its newest call first; empty where its torch does not tell it, or its interpreter is blocked."""
    problem: str = ""
    """Why there are no stacks."""


class NodeStacks(Message):
    """Where the ranks of one node are."""

    node: int
    """The node's number in `perdure nodes`."""
    ranks: tuple[RankPosition, ...] = ()
    problem: str = ""
    """Why nothing is known of its ranks."""
