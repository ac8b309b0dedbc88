"""Reads a specification from plain data, for `perdure submit` and for workflows that were started by JSON.

It needs no file and no YAML, and gives the same answer wherever it runs, so workflows may call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

from pydantic import ValidationError

from .backends import SpecWarning, check_backend, find_unsupported
from .base import fill_template
from .capabilities import CAPABILITIES
from .errors import SpecError, SpecProblem, format_path, format_value, problem_report
from .fields import Location
from .job import Backend, JobSpec
from .launcher_sizes import find_unused_sizes

MAX_BYTES = 16 * 1024
"""The largest specification as JSON: it is part of the request for each of 128 nodes, within one message to
Temporal."""

MOST_OF_A_TASK = 3_900_000
"""Bytes of the specifications in one task of a workflow: the server ends a workflow whose task is larger than 4 MB."""

_NODES_OF_A_GROUP = 128
_BESIDE = 1_000
"""Bytes of a message beside the specification."""

MAX_DEPTH = 40

_MOST_CHARACTERS = 16 * MAX_BYTES
"""The most characters and values that are read of what may be a specification. One with all defaults written out has
more than `MAX_BYTES`. What is much larger, or refers to itself, is refused before it is looked at: anyone who may
create an object writes it, and all that a worker or an operator serves waits meanwhile."""


def parse_spec(data: Any) -> JobSpec:
    """Reads a specification from mappings, lists and scalars, and fills in `${job.name}` and the like.

    It does not check backends: see `validate_spec`.

    Raises:
        SpecError: with all errors.
    """
    if not isinstance(data, Mapping):
        problem = SpecProblem(location=(), value=format_value(data), expected="a mapping with name and roles")
        raise SpecError([problem])
    refuse_large(data)
    problems: list[SpecProblem] = []
    text_keyed = _check_keys(data, (), problems)
    spec = None
    try:
        spec = JobSpec.model_validate(text_keyed)
    except ValidationError as error:
        problems += problem_report(error).problems
    if spec is not None:
        spec = fill_templates(spec)
        size = len(spec.model_dump_json(exclude_defaults=True).encode())
        if size > MAX_BYTES:
            problems.append(
                SpecProblem(
                    location=(),
                    value=f"{size} bytes as JSON",
                    expected=f"at most {MAX_BYTES}",
                    hint=f"move long texts into files that the command reads; {_name_longest(text_keyed)}",
                )
            )
        elif copies := _too_many_copies(spec):
            problems.append(
                SpecProblem(
                    location=("roles",),
                    value=f"{len(spec.roles)} roles",
                    expected=f"fewer, or a smaller job: it is sent {copies} times in one message to Temporal",
                    hint="start some of the roles as a job of their own",
                )
            )
    if problems or spec is None:
        raise SpecError(problems)
    return spec


def refuse_large(data: Any) -> None:
    """Refuses data that is far too large for a specification, in a time that does not grow with it.

    Raises:
        SpecError: if it is.
    """
    left, waiting = _MOST_CHARACTERS, [data]
    while waiting:
        value = waiting.pop()
        left -= 1
        if isinstance(value, str | bytes):
            left -= len(value)
        elif isinstance(value, Mapping):
            keys = cast("Mapping[Any, Any]", value)
            left -= len(keys)
            if left > 0:
                waiting += [*keys, *keys.values()]
        elif isinstance(value, Sequence):
            items = cast("Sequence[Any]", value)
            left -= len(items)
            if left > 0:
                waiting += items
        if left <= 0:
            message = f"has more than {_MOST_CHARACTERS:,} characters, and is not read"
            raise SpecError([SpecProblem(location=(), message=message)])


def validate_spec(data: Mapping[str, Any] | JobSpec) -> tuple[JobSpec, tuple[SpecWarning, ...]]:
    """Reads a specification and checks that this release can run it on its backend.

    Raises:
        SpecError: with all errors: fields and values, and those that the backend or this release does not support.
    """
    if isinstance(data, JobSpec):
        return data, _find_warnings(data)
    try:
        spec = parse_spec(data)
    except SpecError as error:
        raise SpecError((*error.problems, *_unsupported_fields(data, error))) from None
    return spec, _find_warnings(spec)


def _find_warnings(spec: JobSpec) -> tuple[SpecWarning, ...]:
    return (*check_backend(spec), *find_unused_sizes(spec))


def validate_started(data: Any) -> JobSpec:
    """Checks the specification that a workflow was started with as `validate_spec` does, and that the files it needs
    from the submitting machine were uploaded.

    Raises:
        SpecError: with all errors.
    """
    spec, _ = validate_spec(data)
    workdir = spec.workdir
    if CAPABILITIES[spec.backend].uploads_workdir and workdir and workdir.path and not workdir.archive:
        problem = SpecProblem(
            location=("workdir", "path"),
            value=format_value(workdir.path),
            message="was not uploaded, and pods cannot see the machine that it is on",
            hint="start the job by `perdure submit` or perdure.Client, which upload it; or put the code into the image "
            "or on a volume, and name its folder as workingDir in pod_template",
        )
        raise SpecError([problem])
    return spec


def _unsupported_fields(data: Any, error: SpecError) -> list[SpecProblem]:
    """The errors of a backend's fields in a specification that also has other errors."""
    if not isinstance(data, Mapping):
        return []
    mapping = cast("Mapping[str, Any]", data)
    named = mapping.get("backend") or Backend.LOCAL
    backend = Backend(named) if named in list(Backend) else None
    said = {problem.location for problem in error.problems}
    return [problem for problem in find_unsupported(mapping, backend=backend)[0] if problem.location not in said]


def _check_keys(value: Any, location: Location, problems: list[SpecProblem]) -> Any:
    """Returns a copy whose keys are texts; others become problems, because YAML silently makes keys of other types."""
    if len(location) > MAX_DEPTH:
        raise SpecError([SpecProblem(location=location, message=f"nested more than {MAX_DEPTH} deep")])
    if isinstance(value, Mapping):
        copy: dict[str, Any] = {}
        for key, item in cast("Mapping[Any, Any]", value).items():
            if isinstance(key, str):
                name = _as_text(key, location, problems)
                copy[name] = _check_keys(item, (*location, name), problems)
            else:
                problems.append(_wrong_key(key, location))
        return copy
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = cast("Sequence[Any]", value)
        return [_check_keys(item, (*location, index), problems) for index, item in enumerate(items)]
    return _as_text(value, location, problems) if isinstance(value, str) else value


def _as_text(text: str, location: Location, problems: list[SpecProblem]) -> str:
    """Returns the text; where it has characters that stand for bytes of a command line or a file name, which no JSON
    holds, they are replaced, and become a problem."""
    shown = text.encode(errors="replace").decode()
    if shown == text:
        return text
    hint = "rename the file, or set the text in a script that the command runs"
    problems.append(
        SpecProblem(location=location, value=format_value(shown), message="has bytes that are no UTF-8", hint=hint)
    )
    return shown


def _too_many_copies(spec: JobSpec) -> int:
    """Returns how often the specification is sent in one task, if that is more than a task can hold; else 0.

    A job starts all its groups in its first task. A group may have to request each of its nodes alone.
    """
    most = [role.nodes.max for role in spec.roles.values()]
    groups = sum(-(-nodes // _NODES_OF_A_GROUP) for nodes in most)
    copies = max(groups, *(min(nodes, _NODES_OF_A_GROUP) for nodes in most))
    # Messages have all fields, with their defaults.
    return copies if copies * (len(spec.model_dump_json().encode()) + _BESIDE) > MOST_OF_A_TASK else 0


def _name_longest(data: Any) -> str:
    """Names the longest text of a specification, for people."""

    def texts(value: Any, location: Location) -> Iterator[tuple[int, Location]]:
        if isinstance(value, Mapping):
            for key, item in cast("Mapping[str, Any]", value).items():
                yield from texts(item, (*location, key))
        elif isinstance(value, str):
            yield len(value), location
        elif isinstance(value, Sequence):
            for index, item in enumerate(cast("Sequence[Any]", value)):
                yield from texts(item, (*location, index))

    length, location = max(texts(data, ()), default=(0, ()))
    return f"the longest is {format_path(location)}, of {length:,} characters"


def _wrong_key(key: Any, location: Location) -> SpecProblem:
    if isinstance(key, bool):
        words = '"on", "yes" or "true"' if key else '"off", "no" or "false"'
        hint = f"YAML reads the words {words} as {format_value(key)}: put the key in quotes"
    else:
        hint = "put the key in quotes"
    return SpecProblem(
        location=(*location, format_value(key)), message=f"the key is {format_value(key)}", expected="a text", hint=hint
    )


def fill_templates(spec: JobSpec) -> JobSpec:
    """Returns the specification with `${job.name}` and the like filled in."""

    def fill(text: str) -> str:
        return fill_template(text, name=spec.name, namespace=spec.namespace)

    outputs = {field: None if text is None else fill(text) for field, text in spec.outputs}

    def fill_all(env: Mapping[str, str]) -> dict[str, str]:
        return {name: fill(text) for name, text in env.items()}

    roles = {
        name: role.model_copy(update={"command": [fill(word) for word in role.command], "env": fill_all(role.env)})
        for name, role in spec.roles.items()
    }
    if spec.checkpoint is not None:
        filled = {
            "storage": spec.checkpoint.storage and fill(spec.checkpoint.storage),
            "watch": spec.checkpoint.watch and fill(spec.checkpoint.watch),
        }
        stored = spec.checkpoint.model_copy(update=filled)
        spec = spec.model_copy(update={"checkpoint": stored})
    return spec.model_copy(
        update={"outputs": spec.outputs.model_copy(update=outputs), "roles": roles, "env": fill_all(spec.env)}
    )


def one_line_spec(
    *,
    command: Sequence[str],
    name: str | None = None,
    nodes: int | str = 1,
    nproc_per_node: int | str | None = None,
    namespace: str = "default",
    workdir: str | None = None,
    env: Mapping[str, str] | None = None,
    backend: Backend | str = Backend.LOCAL,
    role: str = "worker",
) -> JobSpec:
    """Builds the specification of `perdure run --nodes 2:4 -- torchrun train.py`.

    Args:
        command: The program and its arguments.
        name: The job's name; by default it is made of the command's script.
        nodes: `4`, or `"2:8"` for min and max.
        nproc_per_node: A number, `gpu`, or none for one per GPU.
        namespace: The job's namespace.
        workdir: The absolute path that the command runs in.
        env: Environment variables of the processes.
        backend: The source of nodes.
        role: The name of the nodes' role.

    Raises:
        SpecError: with all errors.
    """
    return parse_spec(
        {
            "name": default_name(command) if name is None else name,
            "namespace": namespace,
            "backend": str(backend),
            "workdir": None if workdir is None else {"path": workdir},
            "env": dict(env or {}),
            "roles": {role: {"nodes": nodes, "nproc_per_node": nproc_per_node, "command": list(command)}},
        }
    )


def default_name(command: Sequence[str]) -> str:
    """Makes a name for a job without one: its script's name, else its program's."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0] if command else "")
    name = re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower())[:40].strip("-")
    return name or "job"


def to_mapping(spec: JobSpec) -> dict[str, Any]:
    """Converts the specification to plain data without defaults, for people and as the argument of workflows.

    If a preset is named, fields that were set explicitly are kept even if they equal the default.
    """
    if spec.runtime:
        return json.loads(spec.model_dump_json(exclude_unset=True, exclude_none=True))
    return json.loads(spec.model_dump_json(exclude_defaults=True))
