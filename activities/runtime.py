"""Merges a job's specification over the preset that its `runtime` names, once, when the job starts.

This is an activity because presets belong to a cluster. Its result is recorded in the job's history, and everything
after it reads only that result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure.activities.nodes.backend import NodeBackend
from perdure.spec.errors import SpecError
from perdure.spec.validate import to_mapping, validate_started


class PresetRefused(Exception):
    """The job cannot use this preset; the message says why, and who can change that."""


@runtime_checkable
class PresetBackend(Protocol):
    """A backend whose administrators keep presets."""

    name: str

    async def with_preset(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merges the specification over the preset that it names.

        Raises:
            PresetRefused: if the specification cannot use that preset.
        """
        ...


class RuntimeActivities:
    """The activity that resolves `runtime` with the backends of this worker."""

    def __init__(self, backends: Iterable[NodeBackend]) -> None:
        self._backends = {backend.name: backend for backend in backends if isinstance(backend, PresetBackend)}

    @property
    def all(self) -> Sequence[Callable[..., Any]]:
        return (self.resolve_runtime,)

    @activity.defn(name="resolve_runtime")
    async def resolve_runtime(self, data: dict[str, Any]) -> dict[str, Any]:
        """Returns the specification merged with its preset, validated, as plain data.

        Raises:
            ApplicationError: `InvalidSpec`, not retried, if specification and preset conflict.
        """
        backend = self._backends.get(str(data.get("backend")))
        if backend is None:
            raise _invalid(
                f"runtime: backend is {data.get('backend')!r}, which this worker does not serve with presets; "
                "start a worker that does, or write the preset's fields into the specification"
            )
        try:
            return to_mapping(validate_started(await backend.with_preset(data)))
        except PresetRefused as refused:
            raise _invalid(str(refused)) from refused
        except SpecError as error:
            raise _invalid(f"with the preset {data['runtime']} applied:\n{error}") from error


def _invalid(text: str) -> ApplicationError:
    return ApplicationError(text, type="InvalidSpec", non_retryable=True)
