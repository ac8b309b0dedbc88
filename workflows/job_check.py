"""What each run of a job asks of its worker first: facts, and in the first run, whether the job may run at all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows.messages import JobCheck, SiteFacts

_TIMEOUT = timedelta(seconds=10)
"""The worker answers from memory."""


async def check_job(spec: Any) -> JobCheck:
    """The answer to a job's first run. The specification is checked by nothing else: see `perdure.spec.accepted`."""
    return await workflow.execute_local_activity(
        "check_job", spec, result_type=JobCheck, start_to_close_timeout=_TIMEOUT
    )


async def site_facts() -> SiteFacts:
    """The answer to a later run."""
    return await workflow.execute_local_activity("site_facts", result_type=SiteFacts, start_to_close_timeout=_TIMEOUT)
