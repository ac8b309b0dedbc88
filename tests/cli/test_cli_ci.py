"""Tests of what `deploy/ci` gives to CI systems: a shell does the steps of both on a real local job that fails once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.docs.pages import ROOT
from tests.support.command_line import STEPS, CommandLine
from tests.support.waiting import wait_for

PRINTS_COMMANDS = "echo '::error::from the script'; echo '::set-env name=A::b'"
JOB = f"""
name: NAME
retry:
  max_restarts: 1
roles:
  worker:
    nodes: 1
    command: [sh, -c, "{STEPS.replace('"', "")}; {PRINTS_COMMANDS}; [ -e failed ] && exit CODE; touch failed; exit 3"]
"""


def environment_of(command_line: CommandLine) -> dict[str, str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **command_line.environment, "PATH": programs}


def bash(script: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a script as the runners do."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def commands_of(output: str) -> list[str]:
    """Returns the workflow commands in an output that a runner of GitHub obeys."""
    obeyed, token = list[str](), ""
    for line in output.splitlines():
        if token:
            token = "" if line.strip() == f"::{token}::" else token
        elif line.strip().startswith("::stop-commands::"):
            token = line.strip().removeprefix("::stop-commands::")
        elif line.strip().startswith("::"):
            obeyed.append(line)
    return obeyed


@pytest.mark.long("commands")
def test_the_action_runs_a_job_and_annotates_its_file(command_line: CommandLine, job_name: str) -> None:
    command_line.write("job.yaml", JOB.replace("NAME", job_name).replace("CODE", "3"))
    action = yaml.safe_load((ROOT / "deploy/ci/github/action.yml").read_text())
    inputs = {name: str(one.get("default", "")) for name, one in action["inputs"].items()}
    inputs |= {"file": "job.yaml", "package": ""}
    output = command_line.write("github-output", "")
    environment = environment_of(command_line) | {
        "RUNNER_TEMP": str(command_line.folder),
        "GITHUB_OUTPUT": str(output),
        "GITHUB_WORKSPACE": str(command_line.folder),
    }
    [step] = [one for one in action["runs"]["steps"] if one.get("id") == "job"]
    given = {name: inputs[re.fullmatch(r"\$\{\{ inputs\.(\w+) }}", value)[1]] for name, value in step["env"].items()}  # pyrefly: ignore[unsupported-operation]
    done = bash(step["run"], command_line.folder, environment | given)
    assert done.returncode == 1, done
    told = commands_of(done.stdout)
    assert told, done.stdout
    assert all("file=job.yaml" in line for line in told), told
    assert any(f"title=job {job_name}%3A FAILED" in line for line in told), told
    places = dict(line.split("=", 1) for line in output.read_text().splitlines())
    suite = ElementTree.parse(places["junit"]).getroot()[0]
    names = [case.get("name", "") for case in suite]
    assert names[-1] == f"job {job_name}"
    assert any(name.startswith("incident 1:") for name in names)
    report = json.loads(Path(places["report"]).read_text())
    assert (report["version"], report["outcome"]["phase"], report["outcome"]["exit_code"]) == (1, "FAILED", 1)
    incidents: list[dict[str, Any]] = report["incidents"]
    assert incidents[0]["number"] == 1
    assert incidents[-1]["stopped"]

    suggested = CommandLine(command_line.folder, {**command_line.environment, "_PERDURE_COMPLETE": "complete_bash"})
    for words, expected in (
        (f"perdure status {job_name[:-1]}", job_name),
        (f"perdure explain {job_name} ", "1"),
    ):
        environment = {**suggested.environment, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        shell = CommandLine(command_line.folder, environment)
        # A busy machine may miss the deadline of a completion.
        wait_for(lambda shell=shell, expected=expected: expected in shell.run().out.split(), what=words)


@pytest.mark.long("commands")
def test_the_template_runs_a_job_and_leaves_its_reports(command_line: CommandLine, job_name: str) -> None:
    command_line.write("job.yaml", JOB.replace("NAME", job_name).replace("CODE", "0"))
    [template] = yaml.safe_load((ROOT / "deploy/ci/gitlab/perdure.yml").read_text()).values()
    environment = environment_of(command_line) | template["variables"] | {"PERDURE_PACKAGE": ""}
    done = bash("\n".join(template["script"]), command_line.folder, environment)
    assert done.returncode == 0, done
    reports = template["artifacts"]["reports"]
    [entry] = json.loads((command_line.folder / reports["codequality"]).read_text())
    assert entry["severity"] == "info"
    assert entry["location"]["path"] == "job.yaml"
    suite = ElementTree.parse(command_line.folder / reports["junit"]).getroot()[0]
    assert suite.get("failures") == "0"
    [path] = template["artifacts"]["paths"]
    assert json.loads((command_line.folder / path).read_text())["outcome"]["restarts"] == 1
