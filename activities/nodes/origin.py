"""Checks that a request to a backend comes from the group whose nodes it names.

A worker has rights that those who reach Temporal lack, and any workflow of its namespace can request its activities. So
a request counts only if the workflow that makes it has the ID of the group: while a job runs, no other workflow can
have that ID.
"""

from __future__ import annotations

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure.contract import GroupRef, NodeRef, NodeRequest, WatchRequest
from perdure.contract.names import group_index, group_workflow_id, job_workflow_id, node_name


def check_new(*requests: NodeRequest) -> None:
    """Checks requests for new nodes.

    Raises:
        ApplicationError: `NodeRefused`, not retried, if another workflow makes it.
    """
    for request in requests:
        node = request.node
        _check(request.job_id, job_workflow_id(request.spec.namespace, request.spec.name))
        _check(request.group_id, group_workflow_id(request.job_id, node.uid, node.role, group_index(node.rank)))
        _check(request.name, node_name(request.spec.name, node))
        _check(_caller(), request.group_id)


def check_nodes(*nodes: NodeRef) -> None:
    """Checks a request about existing nodes.

    Raises:
        ApplicationError: `NodeRefused`, not retried, if another workflow makes it.
    """
    for node in nodes:
        job_id = _job_id(node.namespace)
        _check(_caller(), group_workflow_id(job_id, node.uid, node.role, group_index(node.rank)))
        _check(node.name, node_name(job_id.rpartition("/")[2], node))


def check_group(group: GroupRef | WatchRequest) -> None:
    """Checks a request about a whole group.

    Raises:
        ApplicationError: `NodeRefused`, not retried, if another workflow makes it.
    """
    job_id = _job_id(group.namespace)
    _check(_caller(), group_workflow_id(job_id, group.uid, group.role, group.group))
    if isinstance(group, WatchRequest):
        _check(group.job_id, job_id)
        _check(group.group_id, _caller())


def _caller() -> str:
    """Returns the ID of the workflow that makes the request; empty if none does."""
    return activity.info().workflow_id or ""


def _job_id(namespace: str) -> str:
    """Returns the workflow ID of the job that the calling group belongs to, if that is in the namespace."""
    parts = _caller().split("/")
    return job_workflow_id(namespace, parts[2] if len(parts) > 2 else "")


def _check(found: str, expected: str) -> None:
    if found != expected:
        text = f"the workflow {_caller()} may not request this: expected {expected}, found {found}"
        raise ApplicationError(text, type="NodeRefused", non_retryable=True)
