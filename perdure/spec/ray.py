"""What a job asks of a Ray cluster beyond the resources that every backend knows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, cast

from pydantic import Field, JsonValue, field_validator

from .base import Section

_NOT_FOR_NODES = {
    "env_vars": "set env, which reaches the command",
    "image_uri": "Perdure starts agent and launcher as processes of Ray's machines",
    "container": "Perdure starts agent and launcher as processes of Ray's machines",
    "worker_process_setup_hook": "it belongs to Ray's own workers",
    "py_executable": "it starts Ray's own workers; roles.<name>.python names the interpreter of nodes",
    "excludes": "it belongs to a folder that Ray uploads; workdir.exclude leaves files out of workdir",
    "java_jars": "nodes run no Java",
    **dict.fromkeys(
        ("nsight", "_nsight", "rocprof_sys", "_rocprof_sys"),
        "it profiles Ray's own workers; let the role's command begin with the profiler",
    ),
}
_PACKAGES = {
    "pip": frozenset({"packages", "pip_check", "pip_version", "pip_install_options"}),
    "uv": frozenset({"packages", "uv_check", "uv_version", "uv_pip_install_options"}),
}
"""The fields of each list of packages that is a mapping."""
_INTERPRETERS = (*_PACKAGES, "conda")
"""The fields that give an environment an interpreter of its own."""
_LIMIT = "setup_timeout_seconds"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_KNOWN = frozenset({*_INTERPRETERS, *_NOT_FOR_NODES, "working_dir", "py_modules", "config"})


def has_own_interpreter(environment: Mapping[str, Any]) -> bool:
    """Returns whether a runtime environment has an interpreter of its own, with the packages of the job."""
    return any(name in environment for name in _INTERPRETERS)


def fields_of_plugins(environment: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields of a runtime environment that Ray itself does not have, each with the one that may be meant.

    Ray ignores them unless the cluster has a plugin of their name.
    """
    unknown = sorted(environment.keys() - _KNOWN)
    return {name: next(iter(difflib.get_close_matches(name, sorted(_KNOWN), n=1)), "") for name in unknown}


class RayRole(Section):
    """What Ray provides for each node of a role, in addition to `resources`."""

    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Ray's custom resources, such as `{rack_a: 1}`, and fractions of its own, such as `{GPU: 0.5}`."""
    labels: dict[str, str] = Field(default={})
    """Selectors of the labels of Ray's nodes, as Ray writes them, such as `{market-type: "!spot"}`."""


class RayJob(Section):
    """What Ray prepares for all nodes of a job."""

    runtime_env: dict[str, JsonValue] = Field(default={})
    """Ray's runtime environment of the nodes' actors: `working_dir` (a URL of a package), `pip`, `uv`, `conda`,
    `py_modules` and the like."""
    rack_label: str = ""
    """The label of Ray's nodes that names what fails at once, such as a rack; unset: unknown."""

    @field_validator("runtime_env")
    @classmethod
    def _has_a_meaning_for_nodes(cls, environment: dict[str, Any]) -> dict[str, Any]:
        for name, reason in _NOT_FOR_NODES.items():
            if name in environment:
                raise ValueError(f"{name} has no meaning for Perdure's nodes: {reason}; remove it")
        _check_interpreters(environment)
        _check_config(environment.get("config", {}))
        _check_url("working_dir", environment.get("working_dir"))
        modules = environment.get("py_modules")
        if modules is not None and not isinstance(modules, list):
            raise ValueError(f"py_modules is {modules!r}; expected a list of the URLs of packages")
        for module in cast("list[Any]", modules or []):
            _check_url("py_modules", module)
        return environment


def _check_interpreters(environment: Mapping[str, Any]) -> None:
    chosen = [name for name in _INTERPRETERS if name in environment]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} exclude each other in Ray; keep one, with all packages")
    for name in chosen:
        if name == "conda":
            _check_conda(environment[name])
        else:
            _check_packages(name, environment[name])


def _check_packages(name: str, value: Any) -> None:
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {"packages": value}
    if unknown := sorted(fields.keys() - _PACKAGES[name]):
        raise ValueError(f"{name}.{unknown[0]} is no field of Ray's; expected {', '.join(sorted(_PACKAGES[name]))}")
    packages = fields.get("packages")
    if isinstance(packages, str):
        raise ValueError(f"{name} is {packages!r}, a file of the submitting machine; write its lines as a list")
    if not isinstance(packages, list) or not all(isinstance(one, str) for one in cast("list[Any]", packages)):
        raise ValueError(f"{name} is {packages!r}; expected a list of packages")


def _check_conda(value: Any) -> None:
    if not isinstance(value, (str, dict)):
        raise ValueError(f"conda is {value!r}; expected the name of an environment, or a mapping that describes one")
    # As Ray tells them apart, which reads such a file where the worker talks to it.
    if isinstance(value, str) and PurePath(value).suffix in (".yaml", ".yml"):
        raise ValueError(f"conda is {value!r}, a file of the submitting machine; write its content as a mapping")


def _check_config(config: Any) -> None:
    if not isinstance(config, dict):
        raise ValueError(f"config is {config!r}; expected {{{_LIMIT}: SECONDS}}")
    fields = cast("dict[str, Any]", config)
    if unknown := sorted(fields.keys() - {_LIMIT}):
        raise ValueError(
            f"config.{unknown[0]} has no meaning for Perdure's nodes: Ray builds the environment when it starts a "
            f"node; keep {_LIMIT} alone"
        )
    limit = fields.get(_LIMIT, -1)
    if not isinstance(limit, int) or isinstance(limit, bool) or not (limit > 0 or limit == -1):
        raise ValueError(f"config.{_LIMIT} is {limit!r}; expected whole seconds, or -1 for no limit")


def _check_url(field: str, value: Any) -> None:
    # What has no scheme before that is a path, which Ray reads where the worker talks to it.
    if value is not None and not (isinstance(value, str) and _URL.match(value)):
        raise ValueError(
            f"{field} is {value!r}, a folder of the submitting machine; expected the URL of a package, such as "
            "s3://bucket/code.zip; a folder that Ray's machines share is workdir.path"
        )
