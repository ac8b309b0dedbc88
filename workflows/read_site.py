"""ReadSite: asks a worker about its site, for users who can reach Temporal only.

What a site allows is the worker's configuration. A job's history need not hold it, so it is not among the facts that
each job reads.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.contract import SiteReport
    from perdure.contract.names import READ_SITE

_TIMEOUT = timedelta(seconds=10)
"""The worker answers from memory."""


@workflow.defn(name=READ_SITE)
class ReadSite:
    """The workflow that asks; see the module."""

    @workflow.run
    async def run(self) -> SiteReport:
        return await workflow.execute_local_activity(
            "site_report", result_type=SiteReport, start_to_close_timeout=_TIMEOUT
        )
