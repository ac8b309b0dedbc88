"""Questions about jobs of the past, which a worker answers that keeps a history."""

from __future__ import annotations

import secrets
from datetime import timedelta

from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ActivityError, ApplicationError

from perdure.base.errors import NoWorker, Refused
from perdure.client.connection import CALL_TIMEOUT, Connection
from perdure.client.error_mapping import map_errors
from perdure.contract import HistoryAnswer, HistoryRequest
from perdure.contract.names import READ_HISTORY, history_workflow_id

_PATIENCE = timedelta(seconds=75)
"""A worker takes a question within seconds, and may read thousands of jobs for the answer."""


async def read_history(connection: Connection, request: HistoryRequest) -> HistoryAnswer:
    """Asks a worker.

    Raises:
        NoWorker: if no worker that keeps a history answers.
        Refused: if the history has no such job, or its database does not answer.
    """
    temporal = await connection.connect()
    async with map_errors(connection):
        try:
            return await temporal.execute_workflow(
                READ_HISTORY,
                request,
                id=history_workflow_id(secrets.token_hex(8)),
                task_queue=connection.endpoint.task_queue,
                result_type=HistoryAnswer,
                execution_timeout=_PATIENCE,
                rpc_timeout=CALL_TIMEOUT,
            )
        except WorkflowFailureError as error:
            cause = error.cause
            reason = cause.cause if isinstance(cause, ActivityError) else cause
            if isinstance(reason, ApplicationError) and reason.type == "NoSuchJob":
                raise Refused(reason.message, remedy="`perdure history` lists those that it has.") from error
            if isinstance(reason, ApplicationError):
                raise Refused(f"the history cannot be read: {reason.message}", remedy="`perdure doctor`") from error
            raise NoWorker(
                "no worker that keeps a history answers",
                remedy="A worker keeps one if `pip install 'perdure[history]'` was run for it, and PERDURE_HISTORY is "
                "not off. See docs/history.md.",
            ) from error
