"""Specifications for people to read, in which what looks like a secret is replaced: in `env`, commands and all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from perdure_training.secret_texts import REDACTED, command_without_secrets, is_secret, without_secrets

_VARIABLES = ("env", "env_vars")
"""Fields that have variables by their names, or as a list of names and values: `ray.runtime_env` and `pod_template`."""
_COMMANDS = ("command", "args")


def spec_without_secrets(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a specification as plain data, with what looks like a secret replaced."""
    return cast("dict[str, Any]", _shown(spec, ""))


def _shown(value: Any, field: str) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        if field in _VARIABLES:
            return {name: _variable(name, item) for name, item in mapping.items()}
        return {name: _shown(item, name) for name, item in mapping.items()}
    if not isinstance(value, Sequence):
        return value
    items = cast("Sequence[Any]", value)
    if field in _COMMANDS and all(isinstance(item, str) for item in items):
        return command_without_secrets(items)
    if field in _VARIABLES:
        return [_named_variable(item) for item in items]
    return [_shown(item, "") for item in items]


def _named_variable(item: Any) -> Any:
    shown = _shown(item, "")
    if isinstance(shown, dict) and isinstance(shown.get("value"), str):
        shown["value"] = _variable(str(shown.get("name")), shown["value"])
    return shown


def _variable(name: str, value: Any) -> Any:
    return REDACTED if isinstance(value, str) and is_secret(name, value) else value
