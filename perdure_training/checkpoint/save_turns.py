"""The order in which the checkpointers of one rank save.

A script with several states saves them in turn: the model's, then the average's, then again the model's. All ranks do
so in the same order, but each checkpointer may count steps of its own, so the order alone says where a step of the
training ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections import Counter, deque
from itertools import pairwise
from pathlib import Path
from typing import Any

from perdure_training.checkpoint.world import RankIdentity

_FILE = ".one-count"
"""The checkpointers that save the same steps, in the memory folder of a node. None has a name like this."""
_SURE = 2
"""Steps that two checkpointers must both have saved, one after the other, until they are taken to count alike."""
_INTERVALS = 2
"""Those between the last saves of a checkpointer in which another one must have saved to save in turn with it."""
_REMEMBERED = 64
"""Saves that are remembered: more than a script has checkpointers."""


class SaveTurns:
    """The last saves of one rank."""

    def __init__(self) -> None:
        """Begins without any."""
        self._names: list[str] = []
        self._saves: deque[str] = deque(maxlen=_REMEMBERED)
        self._steps: dict[str, int] = {}
        self._alike: Counter[tuple[str, str]] = Counter()
        """How often two of them have saved the same step, in a row."""
        self._apart: Counter[tuple[str, str]] = Counter()
        """How often they have not."""
        self._since: dict[str, set[str]] = {}
        """Those that have saved since the last save of each."""
        self._beside: dict[str, frozenset[str]] = {}
        """Those that have saved between the last two saves of each."""
        self.stored: set[str] = set()
        """Those whose steps are copied to the job's storage."""
        self.restored: dict[str, int] = {}
        """The steps with which they have begun in this generation; 0 where nothing was loaded."""

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

    def record(self, name: str, step: int) -> bool:
        """Records that a checkpointer is called to save a step, due or not; returns whether others count alike now, or
        not any more, than before."""
        self._saves.append(name)
        if name in self._since:
            self._beside[name] = frozenset(self._since[name])
        self._since[name] = set()
        for other, since in self._since.items():
            if other != name:
                since.add(name)
        self._steps[name] = step
        before = self.of_one_count
        for other, its_step in self._steps.items():
            if other == name:
                continue
            pair = (min(name, other), max(name, other))
            if its_step == step:
                self._alike[pair] += 1
                self._apart[pair] = 0
            else:
                # The first of two that count alike is ahead until the second one saves, too.
                self._apart[pair] += 1
                if self._apart[pair] > 1:
                    self._alike[pair] = 0
        return self.of_one_count != before

    @property
    def of_one_count(self) -> frozenset[str]:
        """The checkpointers that save the same steps, in turn."""
        return frozenset(name for pair, number in self._alike.items() if number >= _SURE for name in pair)

    def stored_beside(self, name: str) -> frozenset[str]:
        """The checkpointers that save in turn with one, as far as that is known yet, and are stored. Any thread may
        call it."""
        return self._beside.get(name, frozenset()) & self.stored & frozenset(self._names)

    def step_of(self, name: str) -> int:
        """The step of a checkpointer's last save; -1 before its first one."""
        return self._steps.get(name, -1)

    def turn_of(self, name: str) -> frozenset[str]:
        """The checkpointers that save once between two saves of `name`, if their turn begins with it: it was created
        before the others. Empty where that is not so, or not known yet. One that saves seldom has no part in it."""
        if self._names == [name]:
            return frozenset({name})
        saves = list(self._saves)
        at = [index for index, one in enumerate(saves) if one == name][-_INTERVALS - 1 :]
        if len(at) < 2 or at[-1] != len(saves) - 1:
            return frozenset()
        between = [Counter(saves[begin:end]) for begin, end in pairwise(at)]
        turn = [one for one in self._names if all(one in some for some in between)]
        seldom = any(all(some[one] > 1 for some in between) for one in turn)
        return frozenset() if seldom or turn[0] != name else frozenset(turn)


_ranks: weakref.WeakValueDictionary[tuple[object, ...], SaveTurns] = weakref.WeakValueDictionary()
"""The ranks of this process, as long as they have a checkpointer."""


def turns_of(own: RankIdentity) -> SaveTurns:
    """Returns the turns of a rank, which its checkpointers share."""
    return _ranks.setdefault((own.folder, own.generation, own.rank), SaveTurns())


def write_of_one_count(folder: Path, names: frozenset[str]) -> None:
    """Has the next world know which checkpointers save the same steps."""
    new = folder / f"{_FILE}.new"
    # Without it the next world restores each for itself.
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(sorted(names)))
        os.replace(new, folder / _FILE)


def read_of_one_count(folder: Path) -> frozenset[str]:
    """Returns the checkpointers that have saved the same steps on this node, as far as that is known."""
    try:
        names: list[Any] = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return frozenset()
    return frozenset(map(str, names))
