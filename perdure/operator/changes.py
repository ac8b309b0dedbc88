"""Compares a new specification with that of a running job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from perdure.spec.errors import format_path
from perdure.spec.fields import Location
from perdure.spec.job import JobSpec

_Difference = tuple[Location, Any]
"""The place of a value that differs, and the running job's value."""

_NAMED = 5
"""The most fields that a refusal names; a user who changed more knows the others."""


def refusal_of_changes(running: JobSpec, desired: JobSpec, *, completed: bool = False) -> str:
    """Why a running job cannot follow a new specification; empty if only fields differ that may change while it
    runs.

    Args:
        running: The specification of the running job.
        desired: The new one.
        completed: Whether the job may have completed its specification when it began, by its preset and by what jobs
            of the past have used. What the new one leaves out is then no difference.
    """
    differences = _differences(running.model_dump(), desired.model_dump())
    fields = [
        format_path(location)
        for location, value in differences
        if not (completed and _is_completion(location, value, desired))
    ]
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
    counts = (f"roles.{name}.nodes.{limit}" for name in job.roles for limit in ("min", "max", "auto"))
    scales = any(field.startswith(f"roles.{name}.scaling.") for name in job.roles)
    return scales or field in (*counts, "ttl_after_finished")


def _differences(before: Any, after: Any, location: Location = ()) -> Iterator[_Difference]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", after)
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), (*location, key))
    elif before != after:
        yield location, before


def _is_completion(location: Location, value: Any, desired: JobSpec) -> bool:
    """Whether a job that was started with the new specification may have this value by completing it."""
    match location:
        case ("roles", str(name), "resources", str(field)) if name in desired.roles:
            resources = desired.roles[name].resources
            if resources.auto and (field == "auto" or getattr(resources, field) is None):
                return True
        case _:
            pass
    return desired.runtime is not None and _includes(value, _stated(location, desired))


def _stated(location: Location, desired: JobSpec) -> Any:
    """The value that a specification states; None where it states none."""
    value: Any = desired.model_dump(exclude_unset=True, exclude_none=True)
    for key in location:
        value = cast("Mapping[Any, Any]", value).get(key) if isinstance(value, Mapping) else None
    return value


def _includes(whole: Any, part: Any) -> bool:
    """Whether the part may have been merged into the whole, as a specification is over its preset."""
    if part is None:
        return True
    if isinstance(whole, Mapping) and isinstance(part, Mapping):
        values = cast("Mapping[str, Any]", whole)
        return all(_includes(values.get(key), value) for key, value in cast("Mapping[str, Any]", part).items())
    if isinstance(whole, list) and isinstance(part, list):
        items = cast("list[Any]", whole)
        return all(any(_includes(one, item) for one in items) for item in cast("list[Any]", part))
    return whole == part
