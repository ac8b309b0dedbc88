"""What a job asks of a Ray cluster beyond the resources that every backend knows."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, JsonValue, field_validator

from .base import Section

_NOT_FOR_NODES = {
    "env_vars": "set env, which reaches the command",
    "image_uri": "Perdure starts agent and launcher as processes of Ray's machines",
    "container": "Perdure starts agent and launcher as processes of Ray's machines",
    "worker_process_setup_hook": "it belongs to Ray's own workers",
}


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
        folder = environment.get("working_dir")
        if folder is not None and "://" not in str(folder):
            raise ValueError(
                f"working_dir is {folder!r}, a folder of the submitting machine; expected the URL of a package, such "
                "as s3://bucket/code.zip; a folder that Ray's machines share is workdir.path"
            )
        return environment
