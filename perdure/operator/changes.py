"""Compares a new specification with that of a running job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from perdure.spec.errors import format_path
from perdure.spec.fields import Location
from perdure.spec.job import JobSpec

_NAMED = 5
"""The most fields that a refusal names; a user who changed more knows the others."""


def refusal_of_changes(running: JobSpec, desired: JobSpec) -> str:
    """Why a running job cannot follow a new specification; empty if only fields differ that may change while it
    runs."""
    fields = [format_path(location) for location in _differences(running.model_dump(), desired.model_dump())]
    fields = [field for field in fields if not _changes_live(field, running)]
    if not fields:
        return ""
    more = f" and {len(fields) - _NAMED} more" if len(fields) > _NAMED else ""
    return (
        f"{', '.join(fields[:_NAMED])}{more}: cannot change while the job runs; only nodes (not their unit), scaling, "
        "suspend and ttl_after_finished can. The job continues unchanged: undo the change, or delete the object and "
        "apply it again"
    )


def _changes_live(field: str, job: JobSpec) -> bool:
    counts = (f"roles.{name}.nodes.{limit}" for name in job.roles for limit in ("min", "max"))
    scales = any(field.startswith(f"roles.{name}.scaling.") for name in job.roles)
    return scales or field in (*counts, "ttl_after_finished")


def _differences(before: Any, after: Any, location: Location = ()) -> Iterator[Location]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", after)
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), (*location, key))
    elif before != after:
        yield location
