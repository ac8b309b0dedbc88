"""Tests of completion in the shells themselves: installed by the option, on a terminal, with the tabulator key."""

from __future__ import annotations

import os
import shlex

import pytest

from perdure.client.sync import SyncClient
from scripts.debian import ensure_program
from tests.support.command_line import PERDURE, STEPS, CommandLine
from tests.support.waiting import wait_for

JOB = f"""
name: NAME
roles:
  worker:
    nodes: 1
    command: [sh, -c, "{STEPS.replace('"', "")}; [ -e failed ] && exec sleep 600; touch failed; exit 3"]
"""
ENTER = "\r"
PLAYED = """#!/bin/sh
[ -n "$_PERDURE_COMPLETE$INSTALLS" ] && exec {perdure} "$@"
printf told:; printf ' %s' "$@"; echo .
"""
"""A `perdure` that completes as ever, and prints its arguments instead of obeying them."""


def of_a_user(command_line: CommandLine) -> CommandLine:
    """A command line whose home has no settings yet, and whose first program on the path is the played one."""
    home = command_line.folder / "home"
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "perdure"
    program.write_text(PLAYED.format(perdure=shlex.join(PERDURE)))
    program.chmod(0o755)
    settings = {
        "HOME": str(home),
        "ZDOTDIR": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local/share"),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
    }
    return CommandLine(home, {**command_line.environment, **settings})


def completes(shell: str, user: CommandLine, typed: str, expected: str) -> bool:
    """Whether the shell makes this of what is typed, with the tabulator at its end."""
    terminal = user.on_terminal("-i", program=(shell,))
    # zsh reads Typer's file at the first one, and completes at the second.
    tabulators = "\t\t" if shell == "zsh" else "\t"
    terminal.press(f"{typed}{tabulators}{ENTER}")
    terminal.expect("told:")
    terminal.expect(".\r")
    terminal.press(f"exit{ENTER}")
    terminal.leave()
    return f"told: {expected}.\r" in terminal.text


@pytest.mark.long("commands")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_names_ranks_nodes_and_incidents(
    shell: str, command_line: CommandLine, jobs: SyncClient, job_name: str
) -> None:
    ensure_program([shell], shell, print)
    command_line.write("job.yaml", JOB.replace("NAME", job_name))
    submitted = command_line.run("submit", "job.yaml")
    assert submitted.code == 0, submitted
    wait_for(lambda: jobs.incidents(job_name), within=120, what="an incident")
    wait_for(lambda: jobs.status(job_name).world_size == 1, within=120, what="a world")
    user = of_a_user(command_line)
    installs = CommandLine(user.folder, {**user.environment, "INSTALLS": "1"})
    installed = installs.run("-c", "perdure --install-completion; true", program=(shell,))
    assert f"{shell} completion installed" in installed.out, installed
    for typed, expected in (
        (f"status {job_name[:-2]}", f"status {job_name}"),
        (f"explain {job_name} ", f"explain {job_name} 1"),
        (f"logs {job_name} --rank ", f"logs {job_name} --rank 0"),
        (f"logs {job_name} --node ", f"logs {job_name} --node 0"),
    ):
        # A busy machine may miss the deadline of a completion.
        wait_for(
            lambda typed=typed, expected=expected: completes(shell, user, f"perdure {typed}", f"{expected}"),
            within=200,
            what=typed,
        )
    jobs.cancel(job_name)
