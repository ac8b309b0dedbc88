"""Commands about specifications: validate and schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.common import ServerSession, Session, err, out
from perdure.cli.reporting import Draft, ReportOption, reporting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.spec.errors import SpecError, SpecProblem
    from perdure.spec.job import JobSpec


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Jobs, in YAML or JSON.", show_default=False)],
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="Check for this backend instead of the file's.", show_default=False),
    ] = None,
    report: ReportOption = None,
    *,
    here: ServerSession,
) -> None:
    """Check job files, and print all errors: path, line, value, expectation.

    Of roles with `resources: auto`, print what they would request now, if a history answers.

    [dim]perdure validate job.yaml · perdure validate jobs/*.yaml -o json[/]
    """
    with reporting(report, *files) as draft:
        _validate(files, backend, draft, here)


def _validate(files: list[Path], backend: str | None, draft: Draft, here: Session) -> None:
    from perdure.base.errors import ExitCode
    from perdure.spec.errors import SpecError
    from perdure.spec.load import validate_file

    reports: list[dict[str, object]] = []
    good: dict[Path, JobSpec] = {}
    for file in files:
        try:
            spec, warnings = validate_file(file, overrides={"backend": backend} if backend else {})
        except (SpecError, OSError) as error:
            problems = _problems(error)
            draft.add_problems(file, problems)
            found = [_data(problem) for problem in problems]
            reports.append({"file": str(file), "valid": False, "problems": found, "warnings": []})
            if not here.json:
                err.print(f"[bold red]{file}[/]: {len(problems)} wrong")
                for problem in problems:
                    err.print(f"  {problem if problem.location else problem.detail}", markup=False)
            continue
        good[file] = spec
        draft.add_problems(file, (), warnings)
        told = [{"path": one.path, "line": one.line, "message": one.message} for one in warnings]
        reports.append({"file": str(file), "valid": True, "problems": [], "warnings": told})
        if not here.json:
            nodes = ", ".join(
                f"{role.nodes} node{'' if str(role.nodes) == '1' else 's'} of {name}"
                for name, role in spec.roles.items()
            )
            out.print(f"[bold green]{file}[/]: ok, {spec.name}: {nodes}, backend {spec.backend}")
            for warning in warnings:
                out.print(f"  warning: {warning}", markup=False)
    _tell_auto(here, good, reports)
    if here.json:
        here.show(reports)
    if not all(one["valid"] for one in reports):
        raise typer.Exit(ExitCode.USAGE)
    here.hint(f"perdure submit {files[0]}", f"perdure run {files[0]}")


def _tell_auto(here: Session, jobs: Mapping[Path, JobSpec], reports: list[dict[str, object]]) -> None:
    """Adds to the reports, and prints, what roles would request that leave it to jobs of the past."""
    from perdure.cli import auto

    chosen = {str(file): found for file, found in zip(jobs, auto.choose(here, tuple(jobs.values())), strict=True)}
    for report in reports:
        found = chosen.get(str(report["file"]), ())
        report["auto"] = [one.model_dump(mode="json") for one in found]
        for line in () if here.json else auto.words(found):
            out.print(f"{report['file']}: {line}", markup=False)


def _problems(error: SpecError | OSError) -> tuple[SpecProblem, ...]:
    from perdure.spec.errors import SpecError, SpecProblem

    if isinstance(error, SpecError):
        return error.problems
    return (SpecProblem(location=(), message=f"cannot be read: {error.strerror or error}"),)


def _data(problem: SpecProblem) -> dict[str, object]:
    """Returns a problem for scripts: what is unset is null."""
    return {
        "path": problem.path if problem.location else None,
        "line": problem.line,
        "value": problem.value or None,
        "expected": problem.expected or None,
        "message": problem.message or None,
        "hint": problem.hint or None,
    }


def schema(
    report: Annotated[bool, typer.Option("--report", help="The schema of JSON reports for CI instead.")] = False,
) -> None:
    """Print the JSON Schema of job files, for editors and CI.

    [dim]perdure schema > perdure.schema.json[/], then at the top of a job file:
    [dim]# yaml-language-server: $schema=perdure.schema.json[/]
    """
    from perdure.spec.schema import json_schema

    if report:
        from perdure.cli.reports import Report

        Session().show(Report.model_json_schema())
        return
    Session().show(json_schema())
