"""Reads the specification of a job that has started, without checks.

A specification is checked once, when its job starts. After that it is data: a later release may allow less, and a
running job must not stop because of that. Only checks are left out; conversions and defaults are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, cast

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import CoreSchema, SchemaValidator

from .errors import SpecError, problem_report
from .job import JobSpec
from .validate import fill_templates, parse_spec

_CONSTRAINTS = frozenset({"ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern", "strict"})
_NOT_SCHEMA = frozenset({"cls", "default", "expected", "function", "members", "metadata", "serialization"})


def read_accepted(data: Any) -> JobSpec:
    """Reads the specification that a job was started with, and fills in `${job.name}` and the like.

    Raises:
        SpecError: if it is not a specification: a field without a default is missing, or a value cannot be converted.
    """
    try:
        return parse_spec(data)
    except SpecError as strict:
        if not isinstance(data, Mapping):
            raise
        try:
            return fill_templates(_without_checks().validate_python(_without_retired(data)))
        except ValidationError as error:
            raise SpecError(problem_report(error).problems or strict.problems) from None


def _read(value: Any, checked: ValidatorFunctionWrapHandler) -> JobSpec:
    try:
        return checked(value)
    except ValidationError:
        return _without_checks().validate_python(_without_retired(value))


AcceptedSpec = Annotated[JobSpec, WrapValidator(_read)]
"""The type of fields that hold the specification of a started job."""


def _without_retired(data: Any) -> Any:
    """Empties `notifications` of a release before 0.3, which was a list without an effect."""
    if not isinstance(data, Mapping):
        return data
    fields = cast("Mapping[str, Any]", data)
    retired = isinstance(fields.get("notifications"), list)
    return {**fields, "notifications": {}} if retired else fields


@cache
def _without_checks() -> SchemaValidator:
    schema = cast("CoreSchema", _relax(JobSpec.__pydantic_core_schema__))
    # Validators that the models have built for themselves do check.
    return SchemaValidator(schema, _use_prebuilt=False)


def _relax(schema: Any) -> Any:
    """A copy of pydantic's schema without checks: functions that run after a value was converted, and constraints."""
    if isinstance(schema, Mapping):
        known = cast("Mapping[str, Any]", schema)
        if known.get("type") == "function-after":
            inner = _relax(known["schema"])
            return {**inner, "ref": known["ref"]} if "ref" in known else inner
        relaxed: dict[str, Any] = {
            key: value if key in _NOT_SCHEMA else _relax(value)
            for key, value in known.items()
            if key not in _CONSTRAINTS or isinstance(value, Mapping)
        }
        if relaxed.get("extra_fields_behavior") == "forbid":
            relaxed["extra_fields_behavior"] = "ignore"
        return relaxed
    if isinstance(schema, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", schema)
        return type(items)(_relax(item) for item in items)
    return schema
