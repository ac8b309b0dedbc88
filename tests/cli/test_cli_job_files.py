"""Tests of what the commands say about job files before anything starts: for people, and for scripts."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine

WRONG = "name: Wrong\nroles:\n  worker:\n    nodes: many\n    nods: 2\n    command: [sh, -c, 'true']\n"
BROKEN = '{"name": "a",\n "roles": {"worker" {}}}\n'


def test_validate_gives_scripts_each_problem_in_its_parts(bare_command_line: CommandLine) -> None:
    bare_command_line.write("wrong.yaml", WRONG)
    bare_command_line.write("broken.json", BROKEN)
    done = bare_command_line.run("validate", "wrong.yaml", "broken.json", "missing.yaml", "-o", "json")
    assert done.code == 2
    wrong, broken, missing = done.json
    assert [(one["path"], one["line"], one["value"]) for one in wrong["problems"]] == [
        ("name", 1, '"Wrong"'),
        ("roles.worker.nodes", 4, '"many"'),
        ("roles.worker.nods", 5, None),
    ]
    assert wrong["problems"][1]["expected"].startswith("a number of nodes such as 4")
    assert 'did you mean "nodes"?' in wrong["problems"][2]["hint"]
    [syntax] = broken["problems"]
    assert (syntax["path"], syntax["line"]) == (None, 2)
    [unreadable] = missing["problems"]
    assert "No such file" in unreadable["message"]


def test_validate_gives_scripts_each_warning_in_its_parts(bare_command_line: CommandLine) -> None:
    bare_command_line.write("good.yaml", "name: a\nroles:\n  worker:\n    nodes: 2:4\n    command: [sh, -c, 'true']\n")
    [report] = bare_command_line.run("validate", "good.yaml", "-o", "json").json
    assert report["problems"] == []
    [warning] = report["warnings"]
    assert (warning["path"], warning["line"]) == ("roles.worker.nodes", 4)


@pytest.mark.parametrize("command", ["submit", "run"])
def test_every_line_about_a_wrong_file_names_it(bare_command_line: CommandLine, command: str) -> None:
    bare_command_line.write("wrong.yaml", WRONG)
    done = bare_command_line.run(command, "wrong.yaml")
    assert done.code == 2
    lines = done.err.removeprefix("error: ").splitlines()
    assert [line.startswith("wrong.yaml: ") for line in lines] == [True, True, True, False], lines


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BROKEN, "not valid JSON at line 2, column 21: Expecting ':' delimiter; there: \"roles\""),
        ('{"name": "a", "roles": {', "not valid JSON at line 1, column 25"),
        ("{name: a, roles: [}\n", "not valid YAML at line 1"),
    ],
)
def test_a_broken_file_is_measured_by_what_it_was_meant_to_be(
    bare_command_line: CommandLine, text: str, told: str
) -> None:
    bare_command_line.write("job.json", text)
    done = bare_command_line.run("validate", "job.json")
    assert done.code == 2
    assert told in done.err


SCRIPTS = [
    ["torchrun", "nope.py"],
    ["torchrun", "--nproc-per-node=2", "nope.py", "--lr", "1"],
    ["python", "-u", "nope.py"],
    ["bash", "-eux", "nope.py"],
]


@pytest.mark.parametrize("command", SCRIPTS, ids=" ".join)
def test_a_script_that_does_not_exist_is_found_before_the_job_starts(
    bare_command_line: CommandLine, command: list[str]
) -> None:
    done = bare_command_line.run("run", "--dry-run", "--", *command)
    assert done.code == 2, done
    assert f'there is no script "nope.py" in {bare_command_line.folder}' in done.err
    assert "workdir.path" in done.err
    spec = {"name": "a", "roles": {"worker": {"nodes": 1, "command": command}}}
    bare_command_line.write("job.yaml", json.dumps(spec))
    assert 'there is no script "nope.py"' in bare_command_line.run("submit", "--dry-run", "job.yaml").err


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "there.py"],
        ["torchrun", "-m", "pkg.train"],
        ["torchrun", "--no-python", "echo"],
        ["python", "-m", "pkg"],
        ["python", "-c", "pass"],
        ["sh", "-c", "python nope.py"],
        ["env", "A=1", "python", "nope.py"],
    ],
    ids=" ".join,
)
def test_a_command_without_a_certain_script_is_not_refused(bare_command_line: CommandLine, command: list[str]) -> None:
    bare_command_line.write("there.py", "")
    assert bare_command_line.run("run", "--dry-run", "--", *command).code == 0


def test_a_script_of_another_machine_is_not_looked_for(bare_command_line: CommandLine) -> None:
    roles = {"worker": {"nodes": 1, "image": "i", "command": ["torchrun", "nope.py"]}}
    bare_command_line.write("job.yaml", json.dumps({"name": "a", "backend": "kubernetes", "roles": roles}))
    assert bare_command_line.run("run", "--dry-run", "job.yaml").code == 0


@pytest.mark.parametrize("command", ["run", "import", "worker", "join"])
def test_help_fills_the_lines_of_a_narrow_terminal(bare_command_line: CommandLine, command: str) -> None:
    bare_command_line.environment = {**bare_command_line.environment, "COLUMNS": "80"}
    text = bare_command_line.run(command, "--help").out
    paragraphs = text[: text.index("╭")].split("\n" + " " * 80 + "\n")
    for paragraph in paragraphs:
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        if lines and "perdure " in lines[0]:
            continue  # examples keep their lines
        for line, following in pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > 78, f"{line!r} is broken early"


def test_a_narrow_terminal_breaks_lines_between_words(bare_command_line: CommandLine) -> None:
    bare_command_line.write("wrong.yaml", WRONG)
    piped = bare_command_line.run("validate", "wrong.yaml").err
    assert max(map(len, piped.splitlines())) > 80, "a pipe gets each line whole"
    terminal = bare_command_line.on_terminal("validate", "wrong.yaml", columns=80)
    assert terminal.leave() == 2
    assert max(map(len, terminal.text.splitlines())) <= 80
    assert terminal.text.split() == piped.split()


PAGE = "http://127.0.0.1:8233/namespaces/default/workflows/job%2Fdefault%2Ftrain-3fa2"
LIVE = f"""
from perdure.cli.live import View, _picture
with _picture(View(name="train-3fa2", flag="", page="{PAGE}")) as update:
    update()
"""


def test_a_live_view_shows_its_link_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    assert 74 < len(PAGE) <= 80
    line = CommandLine(tmp_path)
    terminal = line.on_terminal(program=[sys.executable, "-c", LIVE], columns=80)
    assert terminal.leave() == 0
    assert f";{PAGE}\x1b\\" in terminal.text, "where it leads"
