"""AskNode: puts a question to a node's agent, for users who can reach Temporal only.

Agents serve activities on their own task queues. Standalone activities are not available in every client and server, so
each question is a workflow with one activity: it adds nothing to the job's history, and its answer is gone with the
namespace's retention.
"""

from __future__ import annotations

from temporalio import workflow
from temporalio.common import RawValue

with workflow.unsafe.imports_passed_through():
    from perdure.contract import CheckNode, ReadLog, ReadStacks
    from perdure.contract.names import ASK_NODE, node_task_queue
    from perdure.workflows import options


@workflow.defn(name=ASK_NODE)
class AskNode:
    """The workflow that asks one question; see the module."""

    @workflow.run
    async def run(self, question: ReadLog | ReadStacks | CheckNode) -> RawValue:
        return await workflow.execute_activity(
            question.activity,
            question,
            result_type=RawValue,
            task_queue=node_task_queue(question),
            schedule_to_close_timeout=options.ANSWER_PATIENCE + question.takes,
            retry_policy=options.COMMAND_RETRY,
            summary=question.summary,
        )
