"""Tests of what an agent remembers of earlier checks of its machine."""

from __future__ import annotations

from pathlib import Path

from perdure.agent.machine_history import MachineHistory
from perdure.contract import Check


def check(value: float | None, *, name: str = "processor", subject: str = "") -> Check:
    return Check(name=name, subject=subject, value=value, problem="" if value is not None else "it has not ended")


def test_a_figure_is_compared_with_earlier_ones_of_the_same_machine_and_subject(tmp_path: Path):
    for value in (990.0, 1000.0, 1010.0, 5.0, 1020.0):
        (first,) = MachineHistory(tmp_path).take([check(value)])
        assert first.usual is None, "too little is known"
    (known,) = MachineHistory(tmp_path).take([check(400.0)])
    assert (known.value, known.usual, known.earlier) == (400.0, 1000.0, 5)
    (other,) = MachineHistory(tmp_path).take([check(1.0, subject="cuda:1")])
    assert other.usual is None


def test_a_file_for_each_check_stays_small(tmp_path: Path):
    history = MachineHistory(tmp_path)
    for number in range(100):
        history.take([check(float(number), subject=f"device {number % 50}"), check(1.0, name="clock"), check(None)])
    assert [file.name for file in tmp_path.iterdir()] == ["processor.json"]
    assert (tmp_path / "processor.json").stat().st_size < 40_000
    for number in range(100):
        history.take([check(float(number))])
    (known,) = history.take([check(0.0)])
    assert (known.usual, known.earlier) == (83.5, 32)


def test_a_folder_that_cannot_be_used_is_no_failure(tmp_path: Path):
    (tmp_path / "processor.json").write_text("[")
    assert MachineHistory(tmp_path).take([check(1.0)]) == (check(1.0),)
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert MachineHistory(occupied).take([check(1.0)]) == (check(1.0),)
    assert MachineHistory(None).take([check(1.0)]) == (check(1.0),)
