"""Tests of reports for CI systems, and of completion: their formats, and what hostile texts do to them."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from perdure.cli.completion import complete_job, complete_rank
from perdure.cli.main import app
from perdure.cli.reporting import ReportFormat
from perdure.cli.reports import Incident, Outcome, Problem, Report, shown, written
from tests.docs.pages import ROOT
from tests.support.command_line import CommandLine

WRONG = "name: a\nroles:\n  worker:\n    nodes: many\n    nods: 2\n    command: [sh, -c, 'true']\n"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = "100%, done:\r\n::set-output name=a::b\n##[add-path]x\x1b]52;c;aGk=\x07 <b>&</b>]]>\0\ud800" + "x" * 10_000


def hostile_report() -> Report:
    incident = Incident(
        number=1,
        role="worker",
        title=HOSTILE,
        failure="CRASH",
        culprit=0,
        action=HOSTILE,
        stopped=True,
        started_at=BEGIN,
        duration_s=None,
    )
    outcome = Outcome(
        name="a",
        namespace="default",
        phase="FAILED",
        exit_code=1,
        reason=HOSTILE,
        step=7,
        generations=2,
        restarts=1,
        started_at=BEGIN,
        finished_at=BEGIN + timedelta(seconds=90),
        log_tail=HOSTILE,
    )
    problem = Problem(file="a,b:c.yaml", line=3, path="roles.worker", message=HOSTILE, level="warning")
    return Report(files=("a,b:c.yaml",), problems=(problem,), outcome=outcome, incidents=(incident,))


def test_validate_annotates_the_lines_of_errors(
    bare_command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(bare_command_line.folder.parent))
    bare_command_line.write("wrong.yaml", WRONG)
    reports = ("--report", "github", "--report", "junit=j.xml", "--report", "gitlab=g.json", "--report", "json=r.json")
    done = bare_command_line.run("validate", "wrong.yaml", *reports)
    assert done.code == 2
    name = f"{bare_command_line.folder.name}/wrong.yaml"
    lines = done.out.splitlines()
    assert [line.partition(",title")[0] for line in lines] == [
        f"::error file={name},line=4",
        f"::error file={name},line=5",
    ]
    assert lines[0].endswith('::roles.worker.nodes: got "many"; ' + lines[0].partition('got "many"; ')[2])
    quality = json.loads((bare_command_line.folder / "g.json").read_text())
    assert [(one["location"]["path"], one["location"]["lines"]["begin"]) for one in quality] == [(name, 4), (name, 5)]
    assert len({one["fingerprint"] for one in quality}) == 2
    suite = ElementTree.parse(bare_command_line.folder / "j.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    report = Report.model_validate_json((bare_command_line.folder / "r.json").read_text())
    assert [(one.path, one.line) for one in report.problems] == [("roles.worker.nodes", 4), ("roles.worker.nods", 5)]


def test_submit_reports_what_it_refuses(bare_command_line: CommandLine) -> None:
    done = bare_command_line.run("submit", "missing.yaml", "--wait", "--report", "github")
    assert done.code == 2
    assert done.out == "::error file=missing.yaml,title=perdure::missing.yaml: No such file or directory\n"


@pytest.mark.parametrize("text", ["pdf", "junit", "gitlab="])
def test_a_report_without_a_format_or_a_file_is_refused(text: str) -> None:
    done = CliRunner().invoke(app, ["validate", "job.yaml", "--report", text])
    assert done.exit_code == 2
    assert "--report" in done.output


def test_hostile_texts_make_no_command_of_github() -> None:
    lines = written(hostile_report(), ReportFormat.GITHUB).split("\n")
    assert lines.pop() == ""
    assert [line.split("::")[1].split(" ")[0] for line in lines] == ["warning", "error", "error"]
    assert all(not ord(sign) < 32 for line in lines for sign in line)
    assert lines[0].startswith(
        "::warning file=a%2Cb%3Ac.yaml,line=3,title=specification::roles.worker: 100%25, done:%0A"
    )


def test_hostile_texts_leave_the_other_reports_readable() -> None:
    suite = ElementTree.fromstring(written(hostile_report(), ReportFormat.JUNIT).encode())[0]
    assert [case.find("failure") is not None for case in suite] == [False, True, True]
    assert suite[2].get("time") == "90.000"
    quality: list[dict[str, Any]] = json.loads(written(hostile_report(), ReportFormat.GITLAB))
    assert [one["severity"] for one in quality] == ["minor", "blocker", "blocker"]
    assert all("\x1b" not in one["description"] for one in quality)


def test_the_json_report_follows_its_schema() -> None:
    schema = json.loads(CliRunner().invoke(app, ["schema", "--report"]).output)
    data = json.loads(written(Report(files=("a.yaml",)), ReportFormat.JSON))
    assert data["version"] == 1
    assert data.keys() == schema["properties"].keys()


def test_a_file_outside_of_the_checkout_keeps_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", "/checkout")
    assert shown(Path("/elsewhere/a.yaml")) == "/elsewhere/a.yaml"


def test_the_action_puts_no_input_into_its_scripts() -> None:
    action = yaml.safe_load((ROOT / "deploy/ci/github/action.yml").read_text())
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" and "${{" not in step["run"] for step in steps)
    used = {value for step in steps for value in step["env"].values()}
    assert used == {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}


def test_completion_suggests_ranks_of_the_job_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str]] = []

    class Played:
        def __init__(self, *, address: str | None, namespace: str) -> None:
            self.namespace = namespace

        async def __aenter__(self) -> Played:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def status(self, name: str, *, role: str) -> SimpleNamespace:
            asked.append((self.namespace, name, role))
            return SimpleNamespace(world_size=12)

    monkeypatch.setattr("perdure.client.client.Client", Played)
    context = Context(get_command(app))
    context.params = {"name": "llama", "role": "actor", "namespace": "nlp"}
    assert complete_rank(context, "1") == [("1", ""), ("10", ""), ("11", "")]
    assert asked == [("nlp", "llama", "actor")]


def test_completion_without_a_server_suggests_nothing_and_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # No route leads there: it never answers.
    monkeypatch.setenv("TEMPORAL_ADDRESS", "203.0.113.1:7233")
    begin = time.monotonic()
    assert complete_job(Context(get_command(app)), "") == []
    assert time.monotonic() - begin < 5
