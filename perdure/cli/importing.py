"""The command that converts other systems' jobs to specifications."""

from __future__ import annotations

import os
import secrets
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.common import AddressOption, OutputFormat, Session, before_subcommand, err, out, warn

if TYPE_CHECKING:
    from perdure.spec.importers.documents import Imported
    from perdure.spec.importers.trackers import Trackers
    from perdure.spec.job import Backend

_STDIN = "-"
_REMEDY = "docs/importing.md names the formats, and what becomes of each of their fields."


class SpecFormat(StrEnum):
    """The format in which a specification is printed."""

    YAML = "yaml"
    JSON = "json"


def import_(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | - | -- COMMAND…",
            help="A job of another system, from a file or the standard input; or the command it runs on each node.",
            show_default=False,
        ),
    ],
    with_: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="FILE", help="A file that the job refers to, such as a TrainJob's runtime."),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            "--checkpoints",
            metavar="FOLDER",
            help="Where the job has saved: also print the step and the checkpoint that tracker files of DLRover, "
            "Megatron-LM or DeepSpeed name.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", help="The backend to run the job on.", show_default="where it ran, if this release can"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The job's name.", show_default="the source's")] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the job, as `perdure run` does, instead of printing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="With --run: start the job and leave at once.")
    ] = False,
    output: Annotated[
        SpecFormat | None,
        typer.Option("--output", "-o", help="yaml, or json with the outcome for each field.", show_default="yaml"),
    ] = None,
    address: AddressOption = None,
) -> None:
    """Convert another system's job to a Perdure specification.

    Reads DLRover's ElasticJob, Kubeflow's PyTorchJob and TrainJob, JobSet, Kubernetes' indexed Job, Ray jobs and
    KubeRay's RayJob, and command lines of torchrun and dlrover-run. Everything that is not carried over is printed to
    stderr, with its path, its value and what happens instead; nothing is dropped silently.

    [dim]perdure import pytorchjob.yaml > job.yaml[/]
    [dim]kubectl get trainjob llama -o yaml | perdure import - --with runtime.yaml[/]
    [dim]perdure import --run -- torchrun --nnodes 2:4 --nproc-per-node 8 train.py[/]

    Exits with 2 if the file is invalid, or if you have to write fields of the specification yourself.
    """
    from perdure.base.errors import PerdureError
    from perdure.spec.errors import SpecError
    from perdure.spec.importers.trackers import read_trackers

    as_json = output is SpecFormat.JSON or (output is None and before_subcommand.output is OutputFormat.JSON)
    try:
        imported = _read(source, with_ or [], backend=_backend(backend), name=name)
    except SpecError as error:
        raise PerdureError(f"{source[0]}: {error}", remedy=_REMEDY) from None
    trackers = read_trackers(checkpoints) if checkpoints else None
    for warning in imported.warnings:
        warn(str(warning))
    if trackers is not None:
        _show_trackers(trackers)
    if run and not imported.missing:
        raise typer.Exit(
            _run(source, imported, detach=detach, as_json=as_json, named=name is not None, address=address)
        )
    _show(imported, trackers, as_json=as_json)
    if imported.missing:
        raise typer.Exit(_must_fill(imported))


def _read(source: list[str], others: list[Path], *, backend: Backend | None, name: str | None) -> Imported:
    from perdure.spec.importers.documents import import_command, import_documents
    from perdure.spec.importers.schedulers import refuse_batch_script
    from perdure.spec.load import read_documents

    if not _is_file(source):
        if others:
            raise typer.BadParameter("a command refers to no other files", param_hint="--with")
        return import_command(source, backend=backend, name=name)
    text = f"{sys.stdin.read()}\n" if source[0] == _STDIN else Path(source[0])
    refuse_batch_script(text)
    documents = read_documents(text)
    beside = [document for path in others for document in read_documents(path)]
    return import_documents(documents, others=beside, backend=backend, name=name)


def _is_file(source: list[str]) -> bool:
    first = source[0]
    if len(source) > 1 and (first == _STDIN or first.endswith((".yaml", ".yml", ".json"))):
        raise typer.BadParameter("one file at a time; --with names files that it refers to", param_hint="FILE")
    return len(source) == 1


def _backend(text: str | None) -> Backend | None:
    from perdure.spec.job import Backend

    if text is None:
        return None
    try:
        return Backend(text)
    except ValueError:
        raise typer.BadParameter(f"expected {', '.join(Backend)}", param_hint="--backend") from None


def _show_trackers(trackers: Trackers) -> None:
    for problem in trackers.problems:
        warn(problem)
    if resume := trackers.resume:
        at = "" if resume.step is None else f"at step {resume.step:,} "
        err.print(f"resumes {at}from {resume.path} ({resume.tracker.name})", markup=False, soft_wrap=True)


def _show(imported: Imported, trackers: Trackers | None, *, as_json: bool) -> None:
    from perdure.spec.dump import dump_yaml
    from perdure.spec.errors import format_path

    if not as_json:
        out.out(dump_yaml(imported.spec), end="", highlight=False)
        return
    warnings: list[dict[str, Any]] = [
        {
            "path": warning.path,
            "value": warning.value,
            "fate": str(warning.fate),
            "message": warning.message,
            "line": warning.line,
        }
        for warning in imported.warnings
    ]
    Session().show(
        {
            "format": imported.format,
            "spec": imported.spec,
            "missing": [{"field": problem.path, "message": str(problem)} for problem in imported.missing],
            "warnings": warnings,
            "carried": [
                {"source": format_path(carried.source), "field": format_path(carried.field)}
                for carried in imported.carried
            ],
            "understood": [format_path(place) for place in imported.understood],
            **({} if trackers is None else {"resume": _resume(trackers)}),
        }
    )


def _resume(trackers: Trackers) -> dict[str, Any]:
    resume = trackers.resume
    return {
        "step": resume.step if resume else None,
        "path": str(resume.path) if resume else None,
        "tracker": str(resume.tracker) if resume else None,
        "problems": list(trackers.problems),
    }


def _must_fill(imported: Imported) -> int:
    from perdure.base.errors import ExitCode

    err.print("[bold red]to do[/] before the specification can run:")
    for problem in imported.missing:
        err.print(f"  {problem}", markup=False)
    return ExitCode.USAGE


def _run(
    source: list[str], imported: Imported, *, detach: bool, as_json: bool, named: bool, address: str | None
) -> int:
    from perdure.cli.shell_variables import shell_environment
    from perdure.cli.start import run_spec
    from perdure.spec.capabilities import BESIDE_WORKER
    from perdure.spec.job import Backend
    from perdure.spec.validate import validate_spec

    if imported.cluster:
        _compare_clusters(imported.cluster)
    data = dict(imported.spec)
    is_file = _is_file(source)
    if not is_file:
        data["env"] = {**shell_environment([], say=warn), **data.get("env", {})}
        if not named:
            data["name"] = f"{data['name'][:35]}-{secrets.token_hex(2)}"
    if data.get("backend", Backend.LOCAL) in BESIDE_WORKER and "workdir" not in data:
        beside = is_file and source[0] != _STDIN
        data["workdir"] = {"path": str(Path(source[0]).absolute().parent) if beside else os.getcwd()}
    spec, warnings = validate_spec(data)
    here = Session(output=OutputFormat.JSON if as_json else OutputFormat.TEXT, address=address)
    return run_spec(here, spec, tuple(str(warning) for warning in warnings), detach=detach)


def _compare_clusters(dashboard: str) -> None:
    """Says on which Ray cluster a job runs whose source names one, and refuses another one."""
    from perdure.activities.nodes.ray.settings import ADDRESS_VARIABLE, is_of_cluster
    from perdure.base.errors import PerdureError

    address = os.environ.get(ADDRESS_VARIABLE)
    if not address:
        warn(f"the job runs on the Ray cluster of the worker; the file names that of {dashboard}")
        return
    if not is_of_cluster(dashboard, address):
        raise PerdureError(
            f"dashboardUrl names the Ray cluster of {dashboard}, and {ADDRESS_VARIABLE} that of {address}",
            remedy=f"Give the worker the cluster of the file by {ADDRESS_VARIABLE}, or remove dashboardUrl.",
        )
    err.print(f"runs on the Ray cluster {address}, which {dashboard} names", markup=False, soft_wrap=True)
