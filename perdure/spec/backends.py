"""Determines the fields that have a meaning on each backend, so that none is silently ignored.

A field that would change what runs (an image, a volume, a secret) is refused where it has no meaning; a field that only
affects where the nodes run or how soon (a queue, a toleration) leads to a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from perdure_training.secret_texts import is_secret, secrets_in

from .capabilities import CAPABILITIES
from .errors import SpecError, SpecProblem, format_path, format_value, line_of
from .fields import Location
from .job import Backend, JobSpec
from .ray import fields_of_plugins
from .roles import LARGEST_PORT
from .scaling import BatchSize


@dataclass(frozen=True, kw_only=True)
class SpecWarning:
    """A valid setting that is probably not intended."""

    location: Location
    message: str
    line: int | None = None
    """The line of the file, counted from 1; None without a file."""

    @property
    def path(self) -> str:
        """The location as one text, such as `roles.worker.nodes`."""
        return format_path(self.location)

    def with_line(self, lines: Mapping[Location, int]) -> SpecWarning:
        """Returns the same warning, with the line of the file that it is about."""
        return replace(self, line=line_of(self.location, lines))

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" (line {self.line})" if self.line else "")


@dataclass(frozen=True, kw_only=True)
class FieldSupport:
    """The backends on which one field has a meaning."""

    pattern: Location
    """The field; `*` stands for any name or index."""
    backends: frozenset[Backend] = frozenset(Backend)
    """The backends that support the field."""
    harmless: bool = False
    """Whether a job without the field still does the same."""
    remedy: str = ""
    """The advice for other backends."""
    because: str = ""
    """Why it has no meaning there, where its name does not say it."""


def _field(path: str, *backends: Backend, harmless: bool = False, remedy: str = "", because: str = ""):
    return FieldSupport(
        pattern=tuple(path.split(".")),
        backends=frozenset(backends) or frozenset(Backend),
        harmless=harmless,
        remedy=remedy,
        because=because,
    )


_PODS = (Backend.KUBERNETES,)
_UPLOADS = tuple(backend for backend, can in CAPABILITIES.items() if can.uploads_workdir)
_CREATES = tuple(backend for backend, can in CAPABILITIES.items() if can.creates_nodes)

FIELD_SUPPORT: tuple[FieldSupport, ...] = (
    _field("runtime", *_PODS, remedy="write the preset's fields into the specification"),
    _field("volumes", *_PODS, remedy="use paths of the machine"),
    _field("roles.*.image", *_PODS, remedy="the command runs with the machine's own programs"),
    _field("roles.*.pod_template", *_PODS, remedy="remove it"),
    _field("queue", *_PODS, harmless=True),
    _field("priority_class", *_PODS, harmless=True),
    _field("limits.queue_timeout", *_PODS, Backend.RAY, harmless=True),
    _field("ttl_after_finished", Backend.KUBERNETES, Backend.JOINED, harmless=True),
    _field(
        "ray.runtime_env",
        Backend.RAY,
        remedy="have its packages and files in the image or in the nodes' environment",
    ),
    _field("ray.rack_label", Backend.RAY, harmless=True),
    _field("roles.*.ray", Backend.RAY, harmless=True),
    _field("workdir.exclude", *_UPLOADS, harmless=True),
    _field("workdir.archive", *_UPLOADS, harmless=True),
    _field(
        "roles.*.scaling",
        *_CREATES,
        remedy="leave it out: a machine that has joined cannot be requested again after it was given up",
    ),
    _field(
        "roles.*.scaling.memory_max",
        *(backend for backend, can in CAPABILITIES.items() if can.limits_memory),
        harmless=True,
        because="nothing gives a node the memory that it requests, and no more",
    ),
    _field("roles.*.scaling.relax", *_PODS, harmless=True),
    _field(
        "roles.*.collocate",
        *_CREATES,
        remedy="remove it, and run `perdure join --role` for each of the roles on the same machine",
    ),
    _field("roles.*.python", *_PODS, Backend.RAY, harmless=True),
    _field("roles.*.image_pull_policy", *_PODS, harmless=True),
    _field("roles.*.image_pull_secrets", *_PODS, harmless=True),
    _field("roles.*.resources", *_PODS, Backend.RAY, harmless=True),
    _field("roles.*.resources.shm", *(one for one in Backend if one is not Backend.RAY), harmless=True),
    _field("roles.*.ports", *_PODS, harmless=True),
    _field("roles.*.tolerations", *_PODS, harmless=True),
    _field("roles.*.topology", *_PODS, harmless=True),
)
"""Fields that only some backends support; all others have a meaning everywhere."""


def check_backend(spec: JobSpec) -> tuple[SpecWarning, ...]:
    """Checks that the job can run on its backend, and returns warnings.

    Raises:
        SpecError: if it cannot.
    """
    problems, warnings = find_unsupported(spec.model_dump(mode="json", exclude_defaults=True), backend=spec.backend)
    if CAPABILITIES[spec.backend].runs_beside_worker:
        problems = (*problems, *_shared_ports(spec))
    if problems:
        raise SpecError(problems)
    return (*_warn_of_shrinking(spec), *_open_secrets(spec), *_foreign_environments(spec), *warnings)


def find_unsupported(
    mapping: Mapping[str, Any], *, backend: Backend | None
) -> tuple[tuple[SpecProblem, ...], tuple[SpecWarning, ...]]:
    """Finds the fields of a specification, valid or not, that its backend does not support; none if that is unknown."""
    problems: list[SpecProblem] = []
    warnings: list[SpecWarning] = []
    if backend is None:
        return (), ()
    for support in FIELD_SUPPORT:
        if backend in support.backends:
            continue
        message = f"has no meaning on the backend {backend}"
        for location in _occurrences(mapping, support.pattern):
            if support.harmless:
                why = f": {support.because}" if support.because else ""
                warnings.append(SpecWarning(location=location, message=f"{message} and is ignored{why}"))
            else:
                problems.append(SpecProblem(location=location, message=message, hint=support.remedy))
    if CAPABILITIES[backend].needs_image:
        problems += _without_image(mapping)
    for location in _occurrences(mapping, ("workdir", "path")):
        path = mapping["workdir"]["path"]
        if isinstance(path, str) and not path.startswith("/"):
            problems.append(
                SpecProblem(
                    location=location,
                    value=format_value(path),
                    expected="an absolute path",
                    hint="relative paths are resolved only if the specification is a file",
                )
            )
    return tuple(problems), tuple(warnings)


def _shared_ports(spec: JobSpec) -> Iterator[SpecProblem]:
    """Finds ports that several nodes of one machine would listen on."""
    users: dict[int, str] = {}
    for name, role in spec.roles.items():
        first = role.ready.port if role.ready is not None else 0
        for port in range(first, first + role.nodes.max) if first else ():
            other = users.setdefault(port, name)
            if other != name or port > LARGEST_PORT:
                yield SpecProblem(
                    location=("roles", name, "ready", "port"),
                    message=f"is {first}, and on this backend node N of the role uses port {first} plus N: {port} is "
                    + (f"a port of {other}, too" if other != name else "no port"),
                    hint="set ports that are as far apart as the roles have nodes",
                )
                break


def _without_image(mapping: Mapping[str, Any]) -> Iterator[SpecProblem]:
    # A preset may name the image; it is known when the job starts.
    roles = None if mapping.get("runtime") else mapping.get("roles")
    for name, role in cast("Mapping[str, Any]", roles).items() if isinstance(roles, Mapping) else ():
        # A pod template may name the image, for the training container.
        if isinstance(role, Mapping) and not {"image", "pod_template"} & set(cast("Mapping[str, Any]", role)):
            yield SpecProblem(
                location=("roles", name, "image"),
                message="is missing",
                expected="the name of a container image with Python and PyTorch",
            )


def _occurrences(value: Any, pattern: Location, location: Location = ()) -> Iterator[Location]:
    """Yields the places that match a pattern and hold a value: all fields of `FIELD_SUPPORT` are empty by default."""
    if not pattern:
        if value not in (None, 0, "", [], {}):
            yield location
    elif isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        for key in mapping if pattern[0] == "*" else (str(pattern[0]),):
            if key in mapping:
                yield from _occurrences(mapping[key], pattern[1:], (*location, key))


def _open_secrets(spec: JobSpec) -> Iterator[SpecWarning]:
    stored = "a Secret of its namespace" if spec.backend is Backend.KUBERNETES else "`perdure secret set NAME/KEY`"
    own = [(("roles", role, "env"), fields.env) for role, fields in spec.roles.items()]
    for place, name, value in ((place, *pair) for place, env in [(("env",), spec.env), *own] for pair in env.items()):
        if is_secret(name, value):
            yield SpecWarning(
                location=(*place, name),
                message="looks like a secret, and its value becomes a part of the specification, which Temporal keeps; "
                f"`secrets: {{{name}: NAME/KEY}}` takes it from {stored}",
            )
    for role, fields in spec.roles.items():
        for word in secrets_in(fields.command):
            what = f"the value of {word.name}" if word.name else "a part of it"
            yield SpecWarning(
                location=("roles", role, "command", word.index),
                message=f"{what} looks like a secret, and becomes a part of the specification, which Temporal keeps, "
                "and of a command line, which other users of the machine can read; `secrets: {VARIABLE: NAME/KEY}` "
                f"gives the command a variable with it, from {stored}",
            )


def _foreign_environments(spec: JobSpec) -> Iterator[SpecWarning]:
    for name, meant in fields_of_plugins(spec.ray.runtime_env).items():
        yield SpecWarning(
            location=("ray", "runtime_env", name),
            message="is no field of Ray's own, which ignores it unless the cluster has a plugin of this name"
            + (f"; did you mean {meant}?" if meant else ""),
        )


def _warn_of_shrinking(spec: JobSpec) -> Iterator[SpecWarning]:
    for name, role in spec.roles.items():
        if role.nodes.elastic and role.ready is None and role.scaling.batch is not BatchSize.GLOBAL:
            yield SpecWarning(
                location=("roles", name, "nodes"),
                message=f"a world may have {role.nodes.min} to {role.nodes.max} nodes; fewer nodes make a smaller "
                "global batch, unless the script adapts its own to WORLD_SIZE",
            )
