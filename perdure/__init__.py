"""Keeps distributed PyTorch training running: a training job is a durable Temporal workflow.

    import perdure

    async with perdure.Client() as client:
        await client.submit(perdure.load_spec("job.yaml"))

Attributes are imported on first use: training scripts import `perdure_training` and need none of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.client.client import Client as Client
    from perdure.client.sync import SyncClient as SyncClient
    from perdure.spec.errors import SpecError as SpecError
    from perdure.spec.job import JobSpec as JobSpec
    from perdure.spec.load import load_spec as load_spec
    from perdure.spec.validate import parse_spec as parse_spec

    __version__: str

__all__ = ["Client", "JobSpec", "SpecError", "SyncClient", "load_spec", "parse_spec"]

_HOMES = {
    "Client": "perdure.client.client",
    "SyncClient": "perdure.client.sync",
    "JobSpec": "perdure.spec.job",
    "SpecError": "perdure.spec.errors",
    "load_spec": "perdure.spec.load",
    "parse_spec": "perdure.spec.validate",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("perdure")
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")
