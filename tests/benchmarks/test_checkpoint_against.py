"""The comparison of saves with a former commit: pairs in turn, and their median ratio."""

from __future__ import annotations

from benchmarks.checkpoint.against import ALLOCATING, Figures, in_turn, ratio


class Saves:
    """Ranks that write down their turns."""

    def __init__(self, name: str, turns: list[str], seconds: list[float]) -> None:
        self._name, self._turns, self._seconds = name, turns, seconds

    def save(self) -> Figures:
        self._turns.append(self._name)
        return {"stall": self._seconds.pop(0)}


def test_both_save_in_turn_with_another_first_in_each_pair_and_first_saves_do_not_count():
    turns: list[str] = []
    allocating = [9.0] * ALLOCATING
    pairs = in_turn(
        Saves("present", turns, [*allocating, 1.0, 2.0, 3.0]),
        Saves("former", turns, [*allocating, 2.0, 2.0, 2.0]),
        saves=3,
    )
    counted = turns[2 * ALLOCATING :]
    assert counted == ["present", "former", "former", "present", "present", "former"]
    assert pairs == [
        ({"stall": 1.0}, {"stall": 2.0}),
        ({"stall": 2.0}, {"stall": 2.0}),
        ({"stall": 3.0}, {"stall": 2.0}),
    ]
    assert ratio(pairs, "stall") == 1.0
