"""What training code may write into the JSON files that its agent reads, and what the agent makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.rank_findings import RankFindings
from perdure.agent.state import AgentState
from perdure.contract import NodeCredentials
from perdure_launcher.warm_start.names import START_PREFIX
from perdure_launcher.warm_start.starts import read_start
from perdure_training.node_api.bodies import World
from perdure_training.node_api.corruption_file import Corruption, corruption_path, read_corruption, write_corruption
from perdure_training.node_api.number_file import FoundNumber, number_path, read_numbers, write_numbers
from perdure_training.node_api.replay_files import ReplayAnswer, answer_path, read_answer, write_answer

NODE = NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="t" * 16)
TOO_DEEP = "[" * 4000
DIGITS = "9" * 400

Read = Callable[[Path], Any]


def _numbers(run: Path) -> Path:
    path = number_path(run / "progress", 0)
    write_numbers(path, [FoundNumber(name="loss", value="nan", step=5, time=1.5)], generation=1)
    return path


def _corruption(run: Path) -> Path:
    path = corruption_path(run / "progress", 0)
    write_corruption(path, Corruption(kind="parameters", step=5, time=1.5), generation=1)
    return path


def _answer(run: Path) -> Path:
    path = answer_path(run / "progress", 0)
    write_answer(path, ReplayAnswer(request=1, step=5, seconds=1.5), generation=1)
    return path


def _start(run: Path) -> Path:
    path = run / "warm" / f"{START_PREFIX}0"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"generation": 1, "pid": 7, "warm": True, "reason": "1.5"}))
    return path


FILES: dict[str, tuple[Callable[[Path], Path], Read]] = {
    "numbers": (_numbers, lambda path: read_numbers(path, generation=1)),
    "corruption": (_corruption, lambda path: read_corruption(path, generation=1)),
    "answer": (_answer, lambda path: read_answer(path, generation=1, beneath=path.parent)),
    "start": (_start, lambda path: read_start(path.parent, 0)),
}


@pytest.mark.parametrize("hostile", [TOO_DEEP, "null", "1", '"x"', "[]", "{}", "\0", "\\ud800", "9" * 4000, "NaN"])
@pytest.mark.parametrize("name", FILES)
def test_in_place_of_a_whole_file(tmp_path: Path, name: str, hostile: str) -> None:
    write, read = FILES[name]
    path = write(tmp_path)
    assert read(path)
    path.write_text(hostile)
    assert not read(path)


@pytest.mark.parametrize("hostile", [DIGITS, f"-{DIGITS}", "NaN", "-Infinity", "1e999", "[[1]]", '{"a": 1}', "null"])
@pytest.mark.parametrize("name", ["numbers", "corruption", "answer"])
def test_in_place_of_a_time(tmp_path: Path, name: str, hostile: str) -> None:
    write, read = FILES[name]
    path = write(tmp_path)
    text = path.read_text()
    assert "1.5" in text
    path.write_text(text.replace("1.5", hostile))
    assert not read(path)


def test_a_hostile_file_of_one_rank_hides_no_finding_of_another(tmp_path: Path) -> None:
    """A node's failure is reported after its findings, so a reader that fails would lose both."""
    for rank in range(2):
        found = [FoundNumber(name="loss", value="nan", step=5, time=1.5)]
        write_numbers(number_path(tmp_path / "progress", rank), found, generation=1)
    number_path(tmp_path / "progress", 0).write_text(TOO_DEEP)
    corruption_path(tmp_path / "progress", 0).write_text(TOO_DEEP)
    world = World(
        generation=1,
        nodes=1,
        group_rank=0,
        base_rank=0,
        world_size=2,
        store_address="127.0.0.1",
        store_port=29500,
        store_host=True,
    )
    state = AgentState(world=world, entered=1, processes=2)
    [report] = RankFindings(NODE, tmp_path).find(state, None)
    assert report.generation == 1
