"""The option `--report` of commands that CI systems run, and what they collect for it while they run."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.base.errors import PerdureError

if TYPE_CHECKING:
    from perdure.cli.reports import Incident, Outcome, Problem
    from perdure.client.client import Client
    from perdure.spec.backends import SpecWarning
    from perdure.spec.errors import SpecProblem


class ReportFormat(StrEnum):
    """The CI system that reads a report."""

    GITHUB = "github"
    """Workflow commands, which make annotations."""
    GITLAB = "gitlab"
    """A Code Quality report."""
    JUNIT = "junit"
    JSON = "json"


@dataclass(frozen=True)
class Target:
    """One report that a user requests."""

    format: ReportFormat
    file: Path | None = None
    """Its file; None for standard output."""


def _target(text: str) -> Target:
    name, _, file = text.partition("=")
    if name not in list(ReportFormat):
        raise typer.BadParameter(f"got {text}; expected github, gitlab=FILE, junit=FILE or json=FILE")
    if not file and name != ReportFormat.GITHUB:
        raise typer.BadParameter(f"got {text}; expected {name}=FILE")
    return Target(ReportFormat(name), Path(file) if file else None)


ReportOption = Annotated[
    list[Target] | None,
    typer.Option(
        "--report",
        metavar="FORMAT[=FILE]",
        parser=_target,
        help="A report for CI, as often as needed: github, gitlab=FILE, junit=FILE or json=FILE.",
        show_default=False,
    ),
]


@dataclass
class Draft:
    """What a command has found so far."""

    targets: Sequence[Target]
    files: Sequence[Path]
    problems: list[Problem] = field(default_factory=list["Problem"])
    error: str = ""
    outcome: Outcome | None = None
    incidents: tuple[Incident, ...] = ()

    def add_problems(self, file: Path, problems: Iterable[SpecProblem], warnings: Iterable[SpecWarning] = ()) -> None:
        """Takes what is wrong with a specification."""
        if self.targets:
            from perdure.cli.reports import problems_of

            self.problems.extend(problems_of(file, problems, warnings))

    async def take_end(self, client: Client, name: str) -> None:
        """Takes the result and the incidents of a job that has ended."""
        if not self.targets:
            return
        from perdure.cli.reports import incidents_of, outcome_of

        self.outcome = outcome_of(name, client.namespace, await client.wait(name))
        self.incidents = incidents_of(await client.incidents(name))

    def write(self) -> None:
        """Writes all reports.

        Raises:
            OSError: if a file cannot be written.
        """
        from perdure.cli.reports import Report, shown, written

        report = Report(
            files=tuple(map(shown, self.files)),
            problems=tuple(self.problems),
            error=self.error,
            outcome=self.outcome,
            incidents=self.incidents,
        )
        for target in self.targets:
            text = written(report, target.format)
            if target.file is None:
                typer.echo(text, nl=False)
            else:
                target.file.write_text(text, encoding="utf-8")

    @contextmanager
    def muted(self) -> Generator[None]:
        """Keeps GitHub's runner from obeying what is printed meanwhile, which may quote users' code."""
        if all(target.format is not ReportFormat.GITHUB for target in self.targets):
            yield
            return
        token = secrets.token_hex(16)
        typer.echo(f"::stop-commands::{token}")
        try:
            yield
        finally:
            typer.echo(f"::{token}::")


@contextmanager
def reporting(targets: Sequence[Target] | None, *files: Path) -> Generator[Draft]:
    """Collects what a command finds, and writes its reports, also where it raises an error."""
    from perdure.spec.errors import SpecError

    draft = Draft(targets or (), files)
    try:
        yield draft
    except SpecError as error:
        draft.add_problems(files[0], error.problems)
        raise
    except PerdureError as error:
        draft.error = str(error)
        raise
    except OSError as error:
        draft.error = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise
    finally:
        if draft.targets:
            draft.write()
