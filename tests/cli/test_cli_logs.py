"""Tests of what jobs have printed, as `perdure logs` and `perdure run` show it."""

from __future__ import annotations

import pytest

from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import PERDURE, CommandLine, Finished
from tests.support.waiting import DEADLINE
from tests.support.warm_agents import warm_name

LONG_LINE = r"""
import sys
sys.stdout.buffer.write(b"before\n\xff\xfe" + b"x" * 10_000_000 + b"\x1b[2J\xc3\n" + b"after\n")
"""


@pytest.fixture(scope="module")
def printed(control_plane: LocalControlPlane, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Finished]:
    """A job that has printed more than a pipe holds, and succeeded: its name, and what `run` says of it in JSON."""
    command_line = CommandLine.local(tmp_path_factory.mktemp("printed"), control_plane.state.path)
    command_line.write("long_line.py", LONG_LINE)
    name = warm_name()
    done = command_line.run("run", "--name", name, "-o", "json", "--", "sh", "-c", "seq 50000; python long_line.py")
    return name, done


def test_run_in_json_prints_the_result_alone(printed: tuple[str, Finished]) -> None:
    _, done = printed
    assert done.code == 0, done
    assert done.json["phase"] == "SUCCEEDED"
    assert done.json["exit_code"] == 0


def test_a_closed_pipe_is_no_error(command_line: CommandLine, printed: tuple[str, Finished]) -> None:
    name, _ = printed
    printing = command_line.start("logs", name, program=PERDURE)
    assert printing.stdout is not None
    assert printing.stdout.readline() == "  0 | 1\n"
    printing.stdout.close()
    assert printing.wait(DEADLINE) == 0


def test_a_log_line_of_10_mb_with_invalid_text_and_escapes_is_cut_in_the_view(
    command_line: CommandLine, printed: tuple[str, Finished]
) -> None:
    name, _ = printed
    shown = command_line.run("logs", name, "--grep", "before|x{1000}|after")
    assert shown.code == 0, name
    assert "\x1b" not in shown.out
    before, long, after = shown.out.splitlines()
    assert (before.endswith("before"), after.endswith("after")) == (True, True)
    assert 10_000 < long.count("x") < 20_000
    assert long.endswith(" more characters)")
    assert "\N{REPLACEMENT CHARACTER}" * 2 + "x" in long


@pytest.mark.parametrize(("option", "text"), [("--since", "soon"), ("--grep", "(")])
def test_lines_are_not_chosen_by_what_is_not_understood(
    command_line: CommandLine, job_name: str, option: str, text: str
) -> None:
    refused = command_line.run("logs", job_name, option, text)
    assert refused.code == 2
    assert f'{option}: got "{text}"; expected' in refused.err
