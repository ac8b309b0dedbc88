"""The machines that nodes run on, as a backend sees them: what they have, what is free of it, and which nodes use it.

A backend that can see its machines yields the same object after each change, so that nothing is copied while ten
thousand machines change.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, runtime_checkable

Amounts = Mapping[str, float]
"""Quantities of resources, by name."""


class Labels:
    """Labels of a machine, of which only those that are asked for can be found: ten thousand machines may have 10 kB of
    labels each."""

    __slots__ = ("_known",)

    def __init__(self, labels: Mapping[str, str] = MappingProxyType({})) -> None:
        self._known = array("q", sorted(map(hash, labels.items())))

    def have(self, label: str, value: str) -> bool:
        """Whether a label has this value."""
        wanted = hash((label, value))
        at = bisect_left(self._known, wanted)
        return at < len(self._known) and self._known[at] == wanted


_NO_LABELS: Final = Labels()


class Owner(NamedTuple):
    """The role of a run that has nodes."""

    uid: str
    role: str


@dataclass(slots=True)
class MachineSeen:
    """One machine, without what runs on it."""

    capacity: Amounts
    taints: tuple[str, ...] = ()
    problem: str = ""
    """Why no node can start on it; empty where one can."""


class Use(NamedTuple):
    """What a node, or a pod of another party, uses of a machine or waits for."""

    machine: str
    """Empty while it waits."""
    requests: Amounts
    owner: Owner | None
    """None for another party."""
    reason: str = ""
    """Why it waits."""
    tolerates: tuple[str, ...] = ()
    """Taints that it tolerates; `*` for all."""
    selector: tuple[tuple[str, str], ...] = ()
    """Labels that its machine must have."""


@dataclass
class Machines:
    """All machines of a backend, with what uses them. Sums are kept up to date with each change."""

    machines: dict[str, MachineSeen] = field(default_factory=dict[str, MachineSeen])
    uses: dict[str, Use] = field(default_factory=dict[str, Use])
    """By a name that is unique, such as a pod's uid."""
    labels: dict[str, Labels] = field(default_factory=dict[str, Labels])
    """Labels of machines that pods select them by."""
    events: int = 0
    problem: str = ""
    """Why less is seen than could be."""
    _used: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    _on: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    _waiting: set[str] = field(default_factory=set[str])

    def put(self, key: str, use: Use) -> None:
        """Takes in a node or a pod, or a change of it."""
        known = self.uses.get(key)
        if known == use:
            return
        self.drop(key)
        self.uses[key] = use
        if not use.machine:
            self._waiting.add(key)
            return
        self._on.setdefault(use.machine, set()).add(key)
        used = self._used.setdefault(use.machine, {})
        for resource, number in use.requests.items():
            used[resource] = used.get(resource, 0.0) + number

    def drop(self, key: str) -> None:
        """Takes in that it is gone, or has ended."""
        use = self.uses.pop(key, None)
        self._waiting.discard(key)
        if use is None or not use.machine:
            return
        keys = self._on[use.machine]
        keys.discard(key)
        if not keys:
            # What is left of floating-point sums would count as used.
            del self._on[use.machine]
            del self._used[use.machine]
            return
        used = self._used[use.machine]
        for resource, number in use.requests.items():
            used[resource] -= number

    def free(self, name: str) -> dict[str, float]:
        """Returns what is left of a machine's resources."""
        used = self._used.get(name, {})
        return {what: max(has - used.get(what, 0), 0.0) for what, has in self.machines[name].capacity.items()}

    def on(self, name: str) -> Iterable[Use]:
        """Returns what runs on a machine."""
        return (self.uses[key] for key in self._on.get(name, ()))

    @property
    def waiting(self) -> Iterable[Use]:
        """What waits for a machine."""
        return (self.uses[key] for key in self._waiting)

    def room(self, use: Use, *, at_most: int) -> int:
        """Returns how many nodes like this one the machines have room for."""
        if not use.requests:
            return at_most
        total = 0
        for name, machine in self.machines.items():
            if machine.problem or not self._admits(name, machine, use):
                continue
            free = self.free(name)
            total += min(int(free.get(what, 0) / number + 1e-9) for what, number in use.requests.items() if number > 0)
            if total >= at_most:
                return at_most
        return total

    def _admits(self, name: str, machine: MachineSeen, use: Use) -> bool:
        tolerated = set(use.tolerates)
        if "*" not in use.tolerates and any(tolerated.isdisjoint(_spellings(taint)) for taint in machine.taints):
            return False
        labels = self.labels.get(name, _NO_LABELS)
        return all(labels.have(label, value) for label, value in use.selector)


def _spellings(taint: str) -> tuple[str, ...]:
    """A taint with its value, and its key alone, which tolerates all values."""
    return taint, taint.partition("=")[0]


class MachinesUnknown(Exception):
    """The machines cannot be seen; the message says why, and what would change it."""


@runtime_checkable
class MonitoredBackend(Protocol):
    """A backend that can see its machines."""

    name: str

    def machines(self) -> AsyncGenerator[Machines]:
        """Yields all machines, and again after changes, until it is closed.

        Raises:
            MachinesUnknown: if they cannot be seen for now.
        """
        ...
