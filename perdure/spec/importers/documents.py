"""Converts documents of other systems to specifications: determines their format, reads them, and fits the result to a
backend of this release."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..backends import find_unsupported
from ..capabilities import CAPABILITIES
from ..errors import SpecError, SpecProblem, format_path, format_value
from ..fields import Location, one_of
from ..job import Backend, JobSpec
from ..load import SpecDocument
from ..roles import Role
from ..validate import validate_spec
from .commandline import read_command_line
from .draft import Draft
from .elasticjob import read_elastic_job
from .foreign import group_of, hint_for_documents, hint_for_version
from .jobconfig import read_job_config
from .jobset import read_indexed_job, read_job_set
from .metadata import to_name
from .mpijob import read_mpi_job
from .pytorchjob import read_pytorch_job
from .ray import read_job_file, read_ray_job, read_submission
from .reader import Field, Source, SourceWarning, as_list, as_mapping
from .schedulers import refuse_determined_experiment, refuse_skypilot_task
from .tfjob import read_tf_job
from .trainjob import RUNTIMES, read_train_job


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A field of the source that became a field of the specification."""

    source: Location
    """The location in the source."""
    field: Location
    """The location in the specification."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A specification, and the outcome for each field of its source, which is in one of three lists."""

    format: str
    """The format of the source, such as `Kubeflow PyTorchJob`."""
    spec: dict[str, Any]
    """The specification without defaults, as people write it. Valid if `missing` is empty."""
    warnings: tuple[SourceWarning, ...]
    """Fields that were not simply carried over, in the source's order."""
    carried: tuple[Carried, ...]
    """Fields that were carried over."""
    understood: tuple[Location, ...]
    """Fields that only describe the document, or request what Perdure does anyway."""
    missing: tuple[SpecProblem, ...]
    """Fields that the user has to write or to change before the specification can run."""
    cluster: str = ""
    """The address of the cluster that the source names: a URL of Ray's dashboard; empty if it names none."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of document that can be imported."""

    name: str
    kind: str
    versions: tuple[str, ...]
    """The supported values of `apiVersion`."""
    backend: Backend | None
    """The backend for such jobs; None if no backend corresponds."""
    read: Callable[[Field, Draft, Sequence[Field]], None]
    """Reads the document into the specification, with the runtimes that the document may refer to."""
    sign: str = "kind"
    """The field that shows the format."""


def _alone(read: Callable[[Field, Draft], None]) -> Callable[[Field, Draft, Sequence[Field]], None]:
    return lambda job, draft, runtimes: read(job, draft)


FORMATS: tuple[Format, ...] = (
    Format(
        name="DLRover ElasticJob",
        kind="ElasticJob",
        versions=("elastic.iml.github.io/v1alpha1",),
        backend=Backend.KUBERNETES,
        read=_alone(read_elastic_job),
    ),
    Format(
        name="Kubeflow PyTorchJob",
        kind="PyTorchJob",
        versions=("kubeflow.org/v1",),
        backend=Backend.KUBERNETES,
        read=_alone(read_pytorch_job),
    ),
    Format(
        name="Kubeflow TFJob",
        kind="TFJob",
        versions=("kubeflow.org/v1",),
        backend=Backend.KUBERNETES,
        read=_alone(read_tf_job),
    ),
    Format(
        name="Kubeflow MPIJob",
        kind="MPIJob",
        versions=("kubeflow.org/v2beta1",),
        backend=Backend.KUBERNETES,
        read=_alone(read_mpi_job),
    ),
    Format(
        name="Kubeflow TrainJob",
        kind="TrainJob",
        versions=("trainer.kubeflow.org/v1alpha1",),
        backend=Backend.KUBERNETES,
        read=read_train_job,
    ),
    Format(
        name="JobSet",
        kind="JobSet",
        versions=("jobset.x-k8s.io/v1alpha2", "jobset.x-k8s.io/v1"),
        backend=Backend.KUBERNETES,
        read=_alone(read_job_set),
    ),
    Format(
        name="Kubernetes Job",
        kind="Job",
        versions=("batch/v1",),
        backend=Backend.KUBERNETES,
        read=_alone(read_indexed_job),
    ),
    Format(
        name="KubeRay RayJob",
        kind="RayJob",
        versions=("ray.io/v1", "ray.io/v1alpha1"),
        backend=Backend.RAY,
        read=_alone(read_ray_job),
    ),
)

WITHOUT_KIND: tuple[Format, ...] = (
    Format(
        name="DLRover JobConfig",
        kind="",
        versions=(),
        backend=None,
        read=_alone(read_job_config),
        sign="dl_config",
    ),
    Format(name="Ray job", kind="", versions=(), backend=Backend.RAY, read=_alone(read_job_file), sign="entrypoint"),
    Format(
        name="DLRover Ray job",
        kind="",
        versions=(),
        backend=Backend.RAY,
        read=_alone(read_submission),
        sign="dashboardUrl",
    ),
)
"""Formats that are recognized by a field of their own."""

_COMMAND_LINE = Format(name="command line", kind="", versions=(), backend=Backend.LOCAL, read=_alone(read_command_line))


_WHOLE: Location = ("document",)
"""The location of a problem that concerns the whole document."""


def import_documents(
    documents: Sequence[SpecDocument],
    *,
    others: Sequence[SpecDocument] = (),
    backend: Backend | None = None,
    name: str | None = None,
) -> Imported:
    """Converts the one job among some documents to a specification.

    Args:
        documents: The documents of a file.
        others: Documents of other files, to which the job may refer.
        backend: The backend to run the job on; by default the source's, if there is a corresponding one.
        name: The job's name, which overrides the document's.

    Raises:
        SpecError: if there is not exactly one job, or it is invalid, with paths in the documents.
    """
    documents = [one for document in documents for one in _unpack(document)]
    others = [one for document in others for one in _unpack(document)]
    jobs = [(document, found) for document in documents if (found := _format_of(document)) is not None]
    if len(jobs) != 1:
        names = ", ".join(str(_name_of(document.data)) for document, _ in jobs)
        raise SpecError([_not_one_job(documents) if not jobs else _several_jobs(names)])
    ((document, found),) = jobs
    beside = [other for other in (*documents, *others) if other is not document]
    runtimes = [_source(other, named=True) for other in beside if _kind(other.data) in RUNTIMES]
    sources = [_source(document), *runtimes]
    for other in beside:
        if _kind(other.data) not in RUNTIMES:
            sources.append(_source(other, named=True))
            sources[-1].root.drop("Perdure creates no other objects; create it as before")
    return _import(
        found, sources, [runtime.root for runtime in runtimes], backend=backend, name=name, folder=document.folder
    )


def import_command(command: Sequence[str], *, backend: Backend | None = None, name: str | None = None) -> Imported:
    """Converts a command line that starts torchrun or dlrover-run to a specification.

    Args:
        command: The words of the command line.
        backend: The backend to run the job on.
        name: The job's name; by default the script's.

    Raises:
        SpecError: if it starts neither, or has options that they do not know.
    """
    source = Source(list(command), prefix=("command",))
    return _import(_COMMAND_LINE, [source], [], backend=backend, name=name, folder=None)


def _import(
    found: Format,
    sources: list[Source],
    runtimes: list[Field],
    *,
    backend: Backend | None,
    name: str | None,
    folder: Path | None,
) -> Imported:
    job, draft = sources[0].root, Draft()
    if found.kind:
        job["apiVersion"].settle()
        job["kind"].settle()
    found.read(job, draft, runtimes)
    for runtime in runtimes:
        if not runtime.source.touched:
            runtime.drop("the job refers to another runtime")
    read = _with_inner(sources)
    problems = [problem for source in read for problem in source.problems]
    if problems:
        raise SpecError(problems)
    if name is not None:
        draft.put(("name",), name)
    elif draft.get(("name",)) is None:
        draft.put(("name",), _name_from(draft))
    target = backend or found.backend or Backend.LOCAL
    if backend is None and found.backend is None:
        job[found.sign].warn_changed(
            f"the specification is for the backend {target}, without what has no meaning there; --backend "
            f"{Backend.RAY} or {Backend.KUBERNETES} keeps what has one there",
            value="",
        )
    if target is not Backend.LOCAL:
        draft.put(("backend",), str(target))
    missing = _fit(draft, target, folder)
    return Imported(
        format=found.name,
        spec=_in_order(draft.data),
        warnings=tuple(warning for source in read for warning in source.warnings()),
        carried=tuple(
            Carried(source=place, field=field)
            for source in read
            for place, fields in source.carried.items()
            for field in fields
        ),
        understood=tuple(place for source in read for place in source.understood()),
        missing=tuple(missing),
        cluster=draft.cluster if target is Backend.RAY else "",
    )


def _fit(draft: Draft, backend: Backend, folder: Path | None) -> list[SpecProblem]:
    """Removes what has no meaning on a backend, with a warning for each source field.

    Returns:
        The problems that remain before the specification is valid.
    """
    path = draft.get(("workdir", "path"))
    carried = CAPABILITIES[backend].takes_submitted_folder
    if carried and isinstance(path, str) and folder is not None:
        draft.data["workdir"]["path"] = str((folder / path).resolve())
    problems, warnings = find_unsupported(copy.deepcopy(draft.data), backend=backend)
    for problem in problems:
        if problem.location == ("workdir", "path") and carried:
            continue
        # A folder that is not uploaded needs no list of exclusions.
        location = ("workdir",) if problem.location[0] == "workdir" else problem.location
        for place, field in draft.remove(location):
            field.source.carried[field.location].remove(place)
            hint = "" if problem.hint == "remove it" else f"; {problem.hint}"
            field.drop(f"{problem.path} {_end_of_sentence(problem.message)}{hint}")
    for warning in warnings:
        for place, field in draft.fields_below(warning.location):
            field.warn_changed(f"is {format_path(place)} now, which {warning.message}")
    for place, field in (*draft.fields_below(("env",)), *draft.fields_below(("roles",))):
        if (place[0] == "env" or place[2] in ("command", "env")) and "${job." in str(field.value):
            field.warn_changed(f"in {format_path(place)}, Perdure fills ${{job.…}} in")
    known = {problem.location for problem in draft.missing}
    return [*draft.missing, *(problem for problem in _problems_of(draft) if problem.location not in known)]


def _end_of_sentence(message: str) -> str:
    """Turns a problem's message into the end of a sentence about its field."""
    return f"is {message}" if message.startswith("not ") else message


def _problems_of(draft: Draft) -> list[SpecProblem]:
    try:
        validate_spec(draft.data)
    except SpecError as error:
        return [_with_origin(problem, draft) for problem in error.problems]
    return []


def _with_origin(problem: SpecProblem, draft: Draft) -> SpecProblem:
    origins = {field.path for _, field in draft.fields_below(problem.location)}
    if not origins or problem.location == ("roles",):
        return problem
    hint = "; ".join(part for part in (problem.hint, f"it comes from {', '.join(sorted(origins))}") if part)
    return replace(problem, hint=hint)


def _name_from(draft: Draft) -> str:
    command = draft.get((*draft.role, "command"))
    return to_name(str(command[-1])) if command else "job"


def _in_order(data: dict[str, Any]) -> dict[str, Any]:
    """The specification with its fields in the reference's order."""
    top = {name: data[name] for name in JobSpec.model_fields if name in data}
    if "roles" in top:
        top["roles"] = {
            role: {name: fields[name] for name in Role.model_fields if name in fields}
            for role, fields in top["roles"].items()
        }
    return top


def _unpack(document: SpecDocument) -> Iterator[SpecDocument]:
    """Yields the objects of a List, as `kubectl get -o yaml` prints several; any other document unchanged."""
    listed = as_mapping(document.data)
    items = as_list(listed.get("items")) if listed and listed.get("kind") == "List" else None
    if items is None:
        yield document
        return
    for index, item in enumerate(items):
        lines = {place[2:]: line for place, line in document.lines.items() if place[:2] == ("items", index)}
        yield SpecDocument(data=item, lines=lines, folder=document.folder)


def _format_of(document: SpecDocument) -> Format | None:
    """Determines a document's format; None if it is not a job.

    Raises:
        SpecError: if it is a job of a known kind in an unknown version.
    """
    data, kind = document.data, _kind(document.data)
    if not isinstance(data, dict):
        problem = SpecProblem(location=_WHOLE, value=format_value(data), expected="a mapping")
        raise SpecError([problem])
    mapping = cast("dict[Any, Any]", data)
    if "roles" in mapping and "kind" not in mapping:
        raise SpecError(
            [SpecProblem(location=_WHOLE, message="is a Perdure specification already", hint="perdure run FILE")]
        )
    if kind is None:
        refuse_skypilot_task(mapping)
        refuse_determined_experiment(mapping)
        return next((item for item in WITHOUT_KIND if item.sign in mapping), None)
    found = next((item for item in FORMATS if item.kind == kind), None)
    version = mapping.get("apiVersion")
    if found is None or version in found.versions:
        return found
    if version is not None and group_of(version) not in {group_of(known) for known in found.versions}:
        return None  # Another system's kind of the same name, such as Volcano's Job.
    problem = SpecProblem(
        location=("apiVersion",),
        value=format_value(version),
        expected=one_of(found.versions),
        hint=hint_for_version(kind, version),
    )
    raise SpecError([problem]).with_lines(document.lines)


def _not_one_job(documents: Sequence[SpecDocument]) -> SpecProblem:
    kinds = ", ".join(_title(document.data) for document in documents) or "nothing"
    given = {_kind(document.data) for document in documents}
    known = one_of([f"{item.kind} ({item.versions[0]})" if item.kind in given else item.kind for item in FORMATS])
    signs = one_of([f"{item.sign} ({item.name})" for item in WITHOUT_KIND])
    return SpecProblem(
        location=_WHOLE,
        value=kinds,
        expected=f"one job: {known}, or a file with {signs}",
        hint=hint_for_documents([document.data for document in documents], [item.kind for item in FORMATS]),
    )


def _title(data: Any) -> str:
    """Names a document's kind, and its API group where another group has an importable kind of this name."""
    kind = _kind(data)
    if kind is None:
        return "a document without a kind"
    return f"{kind} ({data.get('apiVersion')})" if any(item.kind == kind for item in FORMATS) else kind


def _several_jobs(names: str) -> SpecProblem:
    return SpecProblem(location=_WHOLE, value=names, expected="one job", hint="put each into a file of its own")


def _kind(data: Any) -> str | None:
    kind = cast("dict[Any, Any]", data).get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def _name_of(data: Any) -> str:
    """Names a document, such as `ConfigMap scripts`."""
    metadata: Any = cast("dict[Any, Any]", data).get("metadata") if isinstance(data, dict) else None
    name: Any = cast("dict[Any, Any]", metadata).get("name") if isinstance(metadata, dict) else None
    return " ".join(str(part) for part in (_kind(data), name) if part) or "document"


def _source(document: SpecDocument, *, named: bool = False) -> Source:
    prefix: Location = (_name_of(document.data),) if named else ()
    return Source(document.data, lines=document.lines, prefix=prefix)


def _with_inner(sources: Sequence[Source]) -> list[Source]:
    return [item for source in sources for item in (source, *_with_inner(source.inner))]
