"""Questions to the agents of nodes that this machine cannot reach, each through a workflow of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar
from uuid import uuid4

from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ActivityError, ApplicationError

from perdure.client.connection import Connection
from perdure.client.error_mapping import map_errors
from perdure.contract import CheckNode, Message, ReadLog, ReadStacks
from perdure.contract.names import ASK_NODE, question_workflow_id

_TIMEOUT = timedelta(seconds=20)
"""The limit for an answer; the agent has 10 s, and what the question takes."""

_Answer = TypeVar("_Answer", bound=Message)


class Unanswered(Exception):
    """The agent did not answer; the message says why."""


async def ask_node(
    connection: Connection, job_id: str, question: ReadLog | ReadStacks | CheckNode, answer: type[_Answer]
) -> _Answer:
    """Has a node's agent answer a question.

    Raises:
        Unanswered: if it does not.
        PerdureError: if the control plane does not answer.
    """
    temporal = await connection.connect()
    try:
        async with map_errors(connection):
            return await temporal.execute_workflow(
                ASK_NODE,
                question,
                result_type=answer,
                id=question_workflow_id(job_id, question, uuid4().hex),
                task_queue=connection.endpoint.task_queue,
                execution_timeout=_TIMEOUT + question.takes,
                static_summary=question.summary,
                rpc_timeout=_TIMEOUT + question.takes,
            )
    except WorkflowFailureError as error:
        refusal = error.cause.cause if isinstance(error.cause, ActivityError) else None
        if isinstance(refusal, ApplicationError):
            raise Unanswered(refusal.message) from error
        raise Unanswered("its agent does not answer: the node may be gone, or just starting") from error
