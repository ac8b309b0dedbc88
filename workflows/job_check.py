"""Questions that each run of a job first asks its worker: facts of the site, and in the first run, whether the job is
valid."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.contract import JobCheck, SiteFacts

_TIMEOUT = timedelta(seconds=10)
"""The worker answers from memory."""


async def check_job(spec: Any) -> JobCheck:
    """Checks the specification, in a job's first run. Nothing else checks it: see `perdure.spec.accepted`."""
    return await workflow.execute_local_activity(
        "check_job", spec, result_type=JobCheck, start_to_close_timeout=_TIMEOUT
    )


async def site_facts() -> SiteFacts:
    """Reads the facts of the site, in a later run."""
    return await workflow.execute_local_activity("site_facts", result_type=SiteFacts, start_to_close_timeout=_TIMEOUT)
