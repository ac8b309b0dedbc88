"""Tests that the forked processes in which tests run `perdure` print what a new process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import PERDURE, CommandLine


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    line = CommandLine.local(tmp_path, tmp_path / "state")
    line.write("wrong.yaml", "name: x\nroles: {worker: {nods: 2, command: [x]}}\n")
    return line


def test_a_forked_command_prints_the_same_to_pipes(command_line: CommandLine) -> None:
    forked = command_line.run("validate", "wrong.yaml")
    assert forked.err
    assert forked == command_line.run("validate", "wrong.yaml", program=PERDURE)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="colors"),
        pytest.param({"NO_COLOR": "1"}, id="no-colors", marks=pytest.mark.long("commands")),
    ],
)
def test_a_forked_command_prints_the_same_on_a_terminal(command_line: CommandLine, environment: dict[str, str]) -> None:
    command_line.environment = {**command_line.environment, **environment}
    drawn: list[str] = []
    for program in ((), PERDURE):
        terminal = command_line.on_terminal("validate", "wrong.yaml", program=program, columns=60)
        assert terminal.leave() == 2
        drawn.append(terminal.raw)
    forked, started = drawn
    assert forked == started
    assert ("\x1b[1;31m" in forked) == (not environment)
