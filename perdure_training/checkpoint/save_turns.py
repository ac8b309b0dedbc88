"""The order in which the checkpointers of one rank save.

A script with several states saves them in turn: the model's, then the average's, then again the model's. All ranks do
so in the same order, but each checkpointer may count steps of its own, so the order alone says where a step of the
training ends.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 64
"""Saves that are remembered: more than a script has checkpointers."""


class SaveTurns:
    """The last saves of one rank."""

    def __init__(self) -> None:
        """Begins without any."""
        self._names: list[str] = []
        self._saves: deque[str] = deque(maxlen=_REMEMBERED)
        self._steps: dict[str, int] = {}

    def add(self, name: str) -> None:
        """Adds a checkpointer."""
        self._names.append(name)

    def remove(self, name: str) -> None:
        """Removes a checkpointer, which saves nothing more."""
        self._names.remove(name)
        self._steps.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether a checkpointer is one of these."""
        return name in self._names

    def record(self, name: str, step: int) -> None:
        """Records that a checkpointer is called to save a step, due or not."""
        self._saves.append(name)
        self._steps[name] = step

    def step_of(self, name: str) -> int:
        """The step of a checkpointer's last save; -1 before its first one."""
        return self._steps.get(name, -1)

    def turn_of(self, name: str) -> frozenset[str]:
        """The checkpointers that have saved since the save before the last one of `name`, if their turn begins with it:
        it was created before the others. Empty where that is not so, or not known yet."""
        if self._names == [name]:
            return frozenset({name})
        before = list(self._saves)[:-1]
        if self._saves[-1] != name or name not in before:
            return frozenset()
        since = before[len(before) - 1 - before[::-1].index(name) :]
        turn = frozenset(one for one in since if one in self._names)
        first = next(one for one in self._names if one in turn)
        return turn if first == name else frozenset()
