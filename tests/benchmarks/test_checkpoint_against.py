"""The comparison of saves with a former commit: pairs in turn, and their median ratio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.checkpoint import against
from benchmarks.checkpoint.against import ALLOCATING, Case, Figures, Saves, in_turn, ratio


class Turns:
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
        Turns("present", turns, [*allocating, 1.0, 2.0, 3.0]),
        Turns("former", turns, [*allocating, 2.0, 2.0, 2.0]),
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


def test_the_last_line_has_the_ratio_of_each_state_and_the_largest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seconds = {"large": (0.2, 0.1), "small": (0.3, 0.4), "small, with copies": (0.1, 0.1)}

    class Fixed:
        def __init__(self, number: float) -> None:
            self._number = number

        def save(self) -> Figures:
            return {"stall": self._number, "finished": 2 * self._number}

    @contextmanager
    def ranks_of(tree: Path, case: Case) -> Iterator[Saves]:
        yield Fixed(seconds[case.name][tree != against.REPOSITORY])

    monkeypatch.setattr(against, "ranks_of", ranks_of)
    monkeypatch.setattr(against, "tree_of", lambda _: nullcontext(Path("former")))
    figures = against.compare("abc", gigabytes=1, saves=2, console=Console())
    assert figures == {"save_vs_former": 2.0, "large_vs_former": 2.0, "small_vs_former": 0.75, "copied_vs_former": 1.0}
    assert "A save, compared with abc" in capsys.readouterr().out
