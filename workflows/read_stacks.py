"""ReadNodeStacks: asks a node's agent where the node's ranks are, for users who can reach Temporal only.

As with logs (`read_log`), each request is a workflow with one activity, and adds nothing to the job's history.
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.contract import NodeStacks, ReadStacks
    from perdure.contract.names import READ_NODE_STACKS, node_task_queue
    from perdure.workflows import options


@workflow.defn(name=READ_NODE_STACKS)
class ReadNodeStacks:
    """The workflow that reads the stacks of one node's ranks; see the module."""

    @workflow.run
    async def run(self, request: ReadStacks) -> NodeStacks:
        return await workflow.execute_activity(
            "read_stacks",
            request,
            result_type=NodeStacks,
            task_queue=node_task_queue(request),
            schedule_to_close_timeout=options.LOG_PATIENCE,
            retry_policy=options.COMMAND_RETRY,
            summary=f"stacks of node {request.rank}.{request.incarnation}",
        )
