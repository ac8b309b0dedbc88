"""Reports for CI systems, which show them where a change is reviewed; `perdure.cli.reporting` has the option.

A report has the same content in each format: errors in specifications with their lines, how the job ended, and its
incidents. What users' code has printed is in it as text, and gives the CI system no commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from xml.etree import ElementTree

from pydantic import BaseModel, ConfigDict

from perdure.cli.reporting import ReportFormat
from perdure.cli.terminal import printable

if TYPE_CHECKING:
    from perdure.contract import IncidentView, JobResult
    from perdure.spec.backends import SpecWarning
    from perdure.spec.errors import SpecProblem

VERSION: Final = 1
"""The version of the JSON report: it grows when a field is removed or changes its meaning."""

_NOT_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class Problem(_Part):
    """An error, or a warning, about a place in a specification."""

    file: str
    """The file, as seen from the repository's root where that is known."""
    line: int | None = None
    """Counted from 1; null where no line is known."""
    path: str = ""
    """The field, such as `roles.worker.nodes`; empty for the whole file."""
    level: Literal["error", "warning"] = "error"
    message: str


class Incident(_Part):
    """An interruption of the job."""

    number: int
    role: str
    title: str
    failure: str | None
    """Its class: see docs/failures.md. Null for what users requested."""
    culprit: int | None
    """The node where it began; null where none is known."""
    action: str
    """What the job did about it."""
    stopped: bool
    """The job stopped because of it."""
    started_at: datetime
    duration_s: float | None
    """Seconds until the world stepped again; null where it did not."""


class Outcome(_Part):
    """How a job ended."""

    name: str
    namespace: str
    phase: str
    """`SUCCEEDED`, `FAILED` or `CANCELLED`."""
    exit_code: int
    reason: str
    step: int | None
    """The last step that the script reported; null where it reports none."""
    generations: int
    restarts: int
    started_at: datetime
    finished_at: datetime
    log_tail: str
    """The end of the output of the node whose failure stopped the job."""


class Report(_Part):
    """Everything that a command reports to a CI system; the JSON report is this object."""

    version: Literal[1] = VERSION
    files: tuple[str, ...]
    """The specifications."""
    problems: tuple[Problem, ...] = ()
    error: str = ""
    """Why the command has no outcome: the job was refused, or the control plane could not be reached."""
    outcome: Outcome | None = None
    """Null where no job ended."""
    incidents: tuple[Incident, ...] = ()


def problems_of(
    file: Path, problems: Iterable[SpecProblem], warnings: Iterable[SpecWarning] = ()
) -> tuple[Problem, ...]:
    """Returns the problems and warnings of a specification's file."""
    name = shown(file)
    errors = [
        Problem(file=name, line=one.line, path=one.path if one.location else "", message=one.detail) for one in problems
    ]
    told = [Problem(file=name, line=one.line, path=one.path, level="warning", message=one.message) for one in warnings]
    return (*errors, *told)


def outcome_of(name: str, namespace: str, result: JobResult) -> Outcome:
    return Outcome(
        name=name,
        namespace=namespace,
        phase=result.phase.value,
        exit_code=result.exit_code,
        reason=result.reason,
        step=result.step,
        generations=result.generations,
        restarts=result.restarts,
        started_at=result.started_at,
        finished_at=result.finished_at,
        log_tail=result.log_tail,
    )


def incidents_of(incidents: Iterable[IncidentView]) -> tuple[Incident, ...]:
    """Returns the interruptions among a job's incidents, without what was only observed."""
    return tuple(
        Incident(
            number=one.number,
            role=one.role,
            title=one.title,
            failure=one.failure and one.failure.value,
            culprit=one.culprit,
            action=one.action,
            stopped=one.stopped,
            started_at=one.started_at,
            duration_s=None
            if (end := one.stepping_at or one.running_at) is None
            else (end - one.started_at).total_seconds(),
        )
        for one in incidents
        if one.observation is None
    )


def shown(file: Path) -> str:
    """Returns a file's path from the root of the repository that CI has checked out, or else as the user gave it."""
    root = os.environ.get("GITHUB_WORKSPACE") or os.environ.get("CI_PROJECT_DIR")
    absolute = file.resolve()
    if root and absolute.is_relative_to(Path(root).resolve()):
        return absolute.relative_to(Path(root).resolve()).as_posix()
    return str(file)


@dataclass(frozen=True)
class _Finding:
    """One remark at a place in a file."""

    level: Literal["error", "warning", "notice"]
    title: str
    message: str
    file: str
    line: int | None = None


def _findings(report: Report) -> Iterable[_Finding]:
    file = report.files[0] if report.files else ""
    for problem in report.problems:
        text = f"{problem.path}: {problem.message}" if problem.path else problem.message
        yield _Finding(problem.level, "specification", text, problem.file, problem.line)
    if report.error:
        yield _Finding("error", "perdure", report.error, file)
    for incident in report.incidents:
        title = f"incident {incident.number}"
        level = "error" if incident.stopped else "notice"
        yield _Finding(level, title, _sentence(incident), file)
    outcome = report.outcome
    if outcome is not None and outcome.exit_code:
        text = "\n".join(part for part in (outcome.reason, outcome.log_tail) if part)
        yield _Finding("error", f"job {outcome.name}: {outcome.phase}", text, file)


def _sentence(incident: Incident) -> str:
    took = "" if incident.duration_s is None else f", {incident.duration_s:.1f} s"
    return f"{incident.title}; {incident.action}{took}" if incident.action else incident.title


def as_github(report: Report) -> str:
    """Writes workflow commands of GitHub Actions, a line for each remark."""
    lines = list[str]()
    for one in _findings(report):
        places = {"file": one.file, "line": str(one.line) if one.line else "", "title": one.title}
        properties = ",".join(f"{name}={_github_property(value)}" for name, value in places.items() if value)
        lines.append(f"::{one.level} {properties}::{_github_data(one.message)}\n")
    return "".join(lines)


def _github_data(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_data(text).replace(":", "%3A").replace(",", "%2C")


_SEVERITIES = {"error": "blocker", "warning": "minor", "notice": "info"}


def as_gitlab(report: Report) -> str:
    """Writes a Code Quality report of GitLab."""
    entries = [
        {
            "description": printable(f"{one.title}: {one.message}"),
            "check_name": f"perdure-{one.title.split(' ')[0]}",
            "fingerprint": hashlib.sha256(repr(one).encode()).hexdigest(),
            "severity": _SEVERITIES[one.level],
            "location": {"path": one.file, "lines": {"begin": one.line or 1}},
        }
        for one in _findings(report)
    ]
    return json.dumps(entries, indent=2) + "\n"


def as_junit(report: Report) -> str:
    """Writes a JUnit report: a test case for the specifications, one for each incident, and one for the job."""
    cases = [_case("perdure.specification", file, _errors_of(report, file)) for file in report.files]
    if report.error:
        cases.append(_case("perdure.job", "job", [report.error]))
    outcome = report.outcome
    group = f"perdure.{outcome.namespace}.{outcome.name}" if outcome else "perdure.job"
    for incident in report.incidents:
        case = _case(group, f"incident {incident.number}: {incident.title}", [_sentence(incident)] * incident.stopped)
        case.set("time", f"{incident.duration_s or 0:.3f}")
        ElementTree.SubElement(case, "system-out").text = _xml(_sentence(incident))
        cases.append(case)
    if outcome is not None:
        case = _case(group, f"job {outcome.name}", [outcome.reason or outcome.phase] * bool(outcome.exit_code))
        case.set("time", f"{(outcome.finished_at - outcome.started_at).total_seconds():.3f}")
        if outcome.log_tail:
            ElementTree.SubElement(case, "system-err").text = _xml(outcome.log_tail)
        cases.append(case)
    failures = sum(case.find("failure") is not None for case in cases)
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        suites, "testsuite", name="perdure", tests=str(len(cases)), failures=str(failures), errors="0", skipped="0"
    )
    suite.extend(cases)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _errors_of(report: Report, file: str) -> list[str]:
    found = [one for one in report.problems if one.file == file and one.level == "error"]
    return ["\n".join(f"{file}:{one.line or 1}: {one.path or 'specification'}: {one.message}" for one in found)] * bool(
        found
    )


def _case(group: str, name: str, failures: list[str]) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=_xml(group), name=_xml(name))
    for text in failures:
        message = _xml(text)
        ElementTree.SubElement(case, "failure", message=message.splitlines()[0] if message else "").text = message
    return case


def _xml(text: str) -> str:
    """Returns a text without what XML 1.0 cannot hold."""
    return _NOT_XML.sub("", printable(text))


def as_json(report: Report) -> str:
    return report.model_dump_json(indent=2) + "\n"


def written(report: Report, format: ReportFormat) -> str:
    """Writes a report in a format."""
    return _FORMATS[format](report)


_FORMATS: dict[ReportFormat, Callable[[Report], str]] = {
    ReportFormat.GITHUB: as_github,
    ReportFormat.GITLAB: as_gitlab,
    ReportFormat.JUNIT: as_junit,
    ReportFormat.JSON: as_json,
}
