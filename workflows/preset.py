"""Requests the whole specification of a job whose specification names a preset, before anything else."""

from __future__ import annotations

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.workflows import options


async def complete(spec: dict[str, Any]) -> dict[str, Any]:
    """Completes a specification with the preset that it names.

    Returns:
        The whole specification, valid, as plain data.

    Raises:
        ApplicationError: if the specification cannot use that preset.
    """
    try:
        return await workflow.execute_activity(
            "resolve_runtime",
            spec,
            result_type=dict[str, Any],
            start_to_close_timeout=options.SHORT_ACTIVITY,
            retry_policy=options.BACKEND_RETRY,
            summary=f"preset {spec['runtime']}",
        )
    except ActivityError as error:
        if not isinstance(error.cause, ApplicationError):
            raise
        raise ApplicationError(error.cause.message, type="InvalidSpec", non_retryable=True) from error
