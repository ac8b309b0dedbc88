"""Starts the workflow of a job."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.errors import Refused
from perdure.base.markdown import code
from perdure.client.connection import CALL_TIMEOUT
from perdure.contract.names import TRAINING_JOB, WORKDIR_MEMO
from perdure.spec.job import JobSpec
from perdure.spec.validate import to_mapping
from perdure.workflows.search_attributes import JOB_BACKEND, JOB_NAMESPACE, JOB_OWNER
from perdure_training.secret_texts import command_without_secrets

_SUMMARY = 200
"""The most characters of a summary; the server takes 400 bytes."""

_LONGEST_KEYWORD = 255
"""The most characters of a search attribute that servers with PostgreSQL or MySQL write: they never list a workflow
that has more."""


async def start_job(
    temporal: Client,
    job: JobSpec,
    workflow_id: str,
    *,
    task_queue: str,
    again: bool,
    memo: Mapping[str, Any],
    owner: str = "",
) -> WorkflowHandle[Any, Any]:
    """Starts the workflow; without search attributes if the namespace does not have them.

    Raises:
        WorkflowAlreadyStartedError: if it runs, or has run and the name may not be used again.
        RPCError: if the server does not accept it.
    """
    attributes = TypedSearchAttributes(
        [
            SearchAttributePair(JOB_OWNER, (owner or _user())[:_LONGEST_KEYWORD]),
            SearchAttributePair(JOB_NAMESPACE, job.namespace),
            SearchAttributePair(JOB_BACKEND, job.backend.value),
        ]
    )
    reuse = WorkflowIDReusePolicy.ALLOW_DUPLICATE if again else WorkflowIDReusePolicy.REJECT_DUPLICATE
    archive = job.workdir.archive if job.workdir else None
    for search_attributes in (attributes, TypedSearchAttributes.empty):
        try:
            return await temporal.start_workflow(
                TRAINING_JOB,
                to_mapping(job),
                id=workflow_id,
                task_queue=task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                id_reuse_policy=reuse,
                search_attributes=search_attributes,
                memo={**memo, **({WORKDIR_MEMO: archive.name} if archive else {})} or None,
                static_summary=_summary(job),
                rpc_timeout=CALL_TIMEOUT,
            )
        except RPCError as error:
            if error.status is not RPCStatusCode.INVALID_ARGUMENT or "search attribute" not in error.message:
                raise
    raise Refused("the namespace has only some of Perdure's search attributes", remedy="Run `perdure doctor`.")


def _summary(job: JobSpec) -> str:
    """The nodes and commands of the job, for the Temporal UI."""
    room = _SUMMARY // len(job.roles)
    roles: list[str] = []
    for name, role in job.roles.items():
        count = f"{role.nodes} node{'' if str(role.nodes) == '1' else 's'}"
        head = count if len(job.roles) == 1 else f"{name}, {count}"
        command = " ".join(command_without_secrets(role.command))
        roles.append(f"{head}: {code(shorten(command, max(room - len(head) - 4, 1), placeholder='…'))}")
    return "; ".join(roles)[:_SUMMARY]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
