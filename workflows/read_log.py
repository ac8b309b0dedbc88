"""ReadNodeLog: reads a piece of a node's log, for users who can reach Temporal only.

Agents serve activities on their own task queues. Standalone activities are not available in every client and server, so
each piece of a log is a workflow with one activity: it adds nothing to the job's history, and its text is gone with the
namespace's retention.
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.contract import LogChunk, ReadLog
    from perdure.contract.names import READ_NODE_LOG, node_task_queue
    from perdure.workflows import options


@workflow.defn(name=READ_NODE_LOG)
class ReadNodeLog:
    """The workflow that reads one piece of a log; see the module."""

    @workflow.run
    async def run(self, request: ReadLog) -> LogChunk:
        return await workflow.execute_activity(
            "read_log",
            request,
            result_type=LogChunk,
            task_queue=node_task_queue(request),
            schedule_to_close_timeout=options.LOG_PATIENCE,
            retry_policy=options.COMMAND_RETRY,
            summary=f"log of node {request.rank}.{request.incarnation}",
        )
