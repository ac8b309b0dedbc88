"""The calls that an agent may make, and what the gateway checks and changes of each.

Whatever is not listed here is refused. A request that is passed on is built anew from the fields that were checked, so
that a field which a later release of Temporal adds cannot carry anything past the gateway. The same holds for what an
agent learns about its job and about the Temporal namespace.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from google.protobuf.message import Message
from pydantic import SecretBytes
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.enums.v1 import TaskQueueKind
from temporalio.api.namespace.v1 import NamespaceInfo
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    DescribeNamespaceResponse,
    DescribeWorkflowExecutionRequest,
    DescribeWorkflowExecutionResponse,
    GetSystemInfoRequest,
    GetSystemInfoResponse,
    PollActivityTaskQueueRequest,
    PollActivityTaskQueueResponse,
    PollWorkflowExecutionUpdateRequest,
    PollWorkflowExecutionUpdateResponse,
    RecordActivityTaskHeartbeatRequest,
    RecordActivityTaskHeartbeatResponse,
    RespondActivityTaskCanceledRequest,
    RespondActivityTaskCanceledResponse,
    RespondActivityTaskCompletedRequest,
    RespondActivityTaskCompletedResponse,
    RespondActivityTaskFailedRequest,
    RespondActivityTaskFailedResponse,
    ShutdownWorkerRequest,
    ShutdownWorkerResponse,
    SignalWorkflowExecutionRequest,
    SignalWorkflowExecutionResponse,
    UpdateWorkflowExecutionRequest,
    UpdateWorkflowExecutionResponse,
)

from perdure.base.credentials.grants import Grant
from perdure.contract import Destination, routed_to
from perdure.contract.datasets import DATASET_NAME
from perdure.contract.names import dataset_workflow_id, probe_task_queue, store_workflow_id
from perdure.gateway.content import why_unreadable

SERVICE: Final = "temporal.api.workflowservice.v1.WorkflowService"

MESSAGES: Final = {destination: frozenset(routed_to(destination)) for destination in Destination}
"""The names of the signals and updates that agents may send to each workflow."""

_IDENTITY_LENGTH: Final = 200
_UPDATE_ID_LENGTH: Final = 200
_REQUEST_ID_LENGTH: Final = 200
"""A server with an SQL database tries to write a longer one than 255 characters again and again, and fails."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Respond = TypeVar(
    "Respond",
    RecordActivityTaskHeartbeatRequest,
    RespondActivityTaskCompletedRequest,
    RespondActivityTaskFailedRequest,
    RespondActivityTaskCanceledRequest,
)


class Denied(Exception):
    """The agent may not make this request; the message names the field."""


class Call(ABC, Generic[Request, Response]):
    """One method of the service, for the agent of one grant."""

    request: ClassVar[type[Message]]
    response: ClassVar[type[Message]]
    forwarded: ClassVar[bool] = True
    """False: the gateway answers by itself."""
    long: ClassVar[bool] = False
    """The call waits for an event. When the gateway stops, the call is answered as if there was none."""
    reports: ClassVar[bool] = False
    """The call signals, queries or updates a workflow of the job. A machine that lost its place may not; it may receive
    the command to stop, and learn whether its job is over."""

    def __init__(self, grant: Grant, keys: Sequence[SecretBytes]) -> None:
        self.grant = grant
        self.keys = keys
        self.workflow = ""
        """The ID of the workflow that receives the payloads of the request, once it has been checked."""

    @abstractmethod
    def check(self, request: Request) -> Request:
        """Returns the request to pass on.

        Raises:
            Denied: if the agent may not make it.
            NotGranted: if it carries the task token of another agent.
        """

    def answer(self, response: Response) -> Response:
        """Returns the response for the agent."""
        return response

    def identity(self, given: str) -> str:
        """Returns the name under which Temporal shows the agent: it cannot pass itself off as another node."""
        host = given.rpartition("@")[2][:_IDENTITY_LENGTH]
        return f"{self.grant.role}-{self.grant.rank}/{self.grant.incarnation}@{host}"

    def own_message(self, message: Payload) -> Payload:
        """Returns a message that names the node itself as its sender, written anew: of a name that occurs twice, which
        readers understand differently, what was checked remains.
        """
        if message.metadata.get("encoding") != b"json/plain":
            raise Denied("input: the message is not JSON")
        try:
            content = json.loads(message.data)
            sender = content["sender"]
            named = tuple(sender[field] for field in ("uid", "role", "rank", "incarnation"))
            data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Denied("input: the message names no sender") from error
        if named != (self.grant.uid, self.grant.role, self.grant.rank, self.grant.incarnation):
            raise Denied("input: the sender is another node")
        return Payload(metadata={"encoding": b"json/plain"}, data=data)

    def permitted_updates(self, workflow: str) -> frozenset[str]:
        """Returns the updates that the agent may send to a workflow: a dataset of its own job, or its store."""
        if workflow == store_workflow_id(self.grant.job_id, self.grant.uid):
            return MESSAGES[Destination.STORE]
        name = workflow.removeprefix(dataset_workflow_id(self.grant.job_id, self.grant.uid, ""))
        if name == workflow or not re.fullmatch(DATASET_NAME, name):
            raise Denied(f"workflow_execution: {workflow!r} is neither a dataset of the node's own job nor its store")
        return MESSAGES[Destination.DATASET]

    def check_namespace(self, namespace: str) -> str:
        """Returns the Temporal namespace, if it is that of the agent's job."""
        if namespace != self.grant.temporal_namespace:
            raise Denied(f"namespace: {namespace!r} is not that of the job")
        return namespace


class GetSystemInfo(Call[GetSystemInfoRequest, GetSystemInfoResponse]):
    """Asks for the server's capabilities, which the SDK needs to connect."""

    request, response = GetSystemInfoRequest, GetSystemInfoResponse

    def check(self, request: GetSystemInfoRequest) -> GetSystemInfoRequest:
        return GetSystemInfoRequest()


class DescribeNamespace(Call[DescribeNamespaceRequest, DescribeNamespaceResponse]):
    """Asks whether the namespace exists, and for its capabilities, which the SDK's worker needs to start."""

    request, response = DescribeNamespaceRequest, DescribeNamespaceResponse

    def check(self, request: DescribeNamespaceRequest) -> DescribeNamespaceRequest:
        return DescribeNamespaceRequest(namespace=self.check_namespace(request.namespace))

    def answer(self, response: DescribeNamespaceResponse) -> DescribeNamespaceResponse:
        info = response.namespace_info
        shown = NamespaceInfo(name=info.name, state=info.state, capabilities=info.capabilities, limits=info.limits)
        return DescribeNamespaceResponse(namespace_info=shown)


class PollActivityTaskQueue(Call[PollActivityTaskQueueRequest, PollActivityTaskQueueResponse]):
    """Waits for a command on the node's own queue, or learns from another one, which is empty, whether polls are
    refused."""

    request, response = PollActivityTaskQueueRequest, PollActivityTaskQueueResponse
    long = True

    def check(self, request: PollActivityTaskQueueRequest) -> PollActivityTaskQueueRequest:
        own = self.grant.task_queue
        if request.task_queue.name not in (own, probe_task_queue(own)):
            raise Denied(f"task_queue: {request.task_queue.name!r} is not the node's own")
        return PollActivityTaskQueueRequest(
            namespace=self.check_namespace(request.namespace),
            task_queue=TaskQueue(name=request.task_queue.name, kind=TaskQueueKind.TASK_QUEUE_KIND_NORMAL),
            identity=self.identity(request.identity),
        )

    def answer(self, response: PollActivityTaskQueueResponse) -> PollActivityTaskQueueResponse:
        if response.task_token:
            workflow = response.workflow_execution.workflow_id
            response.task_token = self.grant.sign_task(response.task_token, workflow, self.keys)
        return response


class _OwnTask(Call[Respond, Response], ABC):
    """A call about a task that the agent was handed."""

    content: ClassVar[tuple[str, ...]]
    """The fields that are passed on as they are."""

    def check(self, request: Respond) -> Respond:
        token, self.workflow = self.grant.verify_task(request.task_token, self.keys)
        passed = type(request)(
            namespace=self.check_namespace(request.namespace),
            task_token=token,
            identity=self.identity(request.identity),
        )
        for field in self.content:
            if request.HasField(cast("Any", field)):
                given = getattr(request, field)
                if found := why_unreadable(given):
                    raise Denied(f"{field}: {found}")
                getattr(passed, field).CopyFrom(given)
        return passed


class RecordActivityTaskHeartbeat(_OwnTask[RecordActivityTaskHeartbeatRequest, RecordActivityTaskHeartbeatResponse]):
    """Keeps a lease."""

    request, response = RecordActivityTaskHeartbeatRequest, RecordActivityTaskHeartbeatResponse
    content = ("details",)


class RespondActivityTaskCompleted(_OwnTask[RespondActivityTaskCompletedRequest, RespondActivityTaskCompletedResponse]):
    """Answers a command."""

    request, response = RespondActivityTaskCompletedRequest, RespondActivityTaskCompletedResponse
    content = ("result",)


class RespondActivityTaskFailed(_OwnTask[RespondActivityTaskFailedRequest, RespondActivityTaskFailedResponse]):
    """Refuses a command."""

    request, response = RespondActivityTaskFailedRequest, RespondActivityTaskFailedResponse
    content = ("failure", "last_heartbeat_details")


class RespondActivityTaskCanceled(_OwnTask[RespondActivityTaskCanceledRequest, RespondActivityTaskCanceledResponse]):
    """Gives back a lease."""

    request, response = RespondActivityTaskCanceledRequest, RespondActivityTaskCanceledResponse
    content = ("details",)


class SignalWorkflowExecution(Call[SignalWorkflowExecutionRequest, SignalWorkflowExecutionResponse]):
    """Reports to the node's own job or group, about the node itself only."""

    request, response = SignalWorkflowExecutionRequest, SignalWorkflowExecutionResponse
    reports = True

    def check(self, request: SignalWorkflowExecutionRequest) -> SignalWorkflowExecutionRequest:
        workflow, name = request.workflow_execution.workflow_id, request.signal_name
        destination = {self.grant.job_id: Destination.JOB, self.grant.group_id: Destination.GROUP}.get(workflow)
        if destination is None:
            raise Denied(f"workflow_execution: {workflow!r} is not the node's own job or group")
        if name not in MESSAGES[destination]:
            raise Denied(f"signal_name: agents do not send {name!r} to {workflow!r}")
        if len(request.input.payloads) != 1:
            raise Denied(f"input: expected one message, not {len(request.input.payloads)}")
        message = self.own_message(request.input.payloads[0])
        self.workflow = workflow
        passed = SignalWorkflowExecutionRequest(
            namespace=self.check_namespace(request.namespace),
            signal_name=name,
            input=Payloads(payloads=[message]),
            identity=self.identity(request.identity),
            request_id=request.request_id[:_REQUEST_ID_LENGTH],
        )
        passed.workflow_execution.workflow_id = workflow
        return passed


class UpdateWorkflowExecution(Call[UpdateWorkflowExecutionRequest, UpdateWorkflowExecutionResponse]):
    """Sends a dataset of the node's own job, or its store, what the node's ranks request."""

    request, response = UpdateWorkflowExecutionRequest, UpdateWorkflowExecutionResponse
    long = True
    reports = True

    def check(self, request: UpdateWorkflowExecutionRequest) -> UpdateWorkflowExecutionRequest:
        self.workflow = request.workflow_execution.workflow_id
        permitted = self.permitted_updates(self.workflow)
        update, name = request.request, request.request.input.name
        if name not in permitted:
            raise Denied(f"request.input.name: agents do not update {self.workflow!r} with {name!r}")
        if len(update.input.args.payloads) != 1:
            raise Denied(f"request.input.args: expected one message, not {len(update.input.args.payloads)}")
        message = self.own_message(update.input.args.payloads[0])
        passed = UpdateWorkflowExecutionRequest(namespace=self.check_namespace(request.namespace))
        passed.workflow_execution.workflow_id = self.workflow
        passed.wait_policy.lifecycle_stage = request.wait_policy.lifecycle_stage
        passed.request.meta.update_id = update.meta.update_id[:_UPDATE_ID_LENGTH]
        passed.request.meta.identity = self.identity(update.meta.identity)
        passed.request.input.name = name
        passed.request.input.args.payloads.append(message)
        return passed


class PollWorkflowExecutionUpdate(Call[PollWorkflowExecutionUpdateRequest, PollWorkflowExecutionUpdateResponse]):
    """Waits for the answer of a dataset of the node's own job, or of its store."""

    request, response = PollWorkflowExecutionUpdateRequest, PollWorkflowExecutionUpdateResponse
    long = True
    reports = True

    def check(self, request: PollWorkflowExecutionUpdateRequest) -> PollWorkflowExecutionUpdateRequest:
        execution = request.update_ref.workflow_execution
        self.workflow = execution.workflow_id
        self.permitted_updates(self.workflow)
        passed = PollWorkflowExecutionUpdateRequest(
            namespace=self.check_namespace(request.namespace), identity=self.identity(request.identity)
        )
        passed.update_ref.workflow_execution.workflow_id = self.workflow
        passed.update_ref.workflow_execution.run_id = execution.run_id
        passed.update_ref.update_id = request.update_ref.update_id[:_UPDATE_ID_LENGTH]
        passed.wait_policy.lifecycle_stage = request.wait_policy.lifecycle_stage
        return passed


class DescribeWorkflowExecution(Call[DescribeWorkflowExecutionRequest, DescribeWorkflowExecutionResponse]):
    """Asks whether the node's own job still runs. The agent learns no more than that."""

    request, response = DescribeWorkflowExecutionRequest, DescribeWorkflowExecutionResponse

    def check(self, request: DescribeWorkflowExecutionRequest) -> DescribeWorkflowExecutionRequest:
        execution = request.execution
        if execution.workflow_id != self.grant.job_id:
            raise Denied(f"execution: {execution.workflow_id!r} is not the node's own job")
        passed = DescribeWorkflowExecutionRequest(namespace=self.check_namespace(request.namespace))
        passed.execution.workflow_id, passed.execution.run_id = execution.workflow_id, execution.run_id
        return passed

    def answer(self, response: DescribeWorkflowExecutionResponse) -> DescribeWorkflowExecutionResponse:
        info = response.workflow_execution_info
        shown = WorkflowExecutionInfo(
            execution=info.execution,
            type=info.type,
            status=info.status,
            first_run_id=info.first_run_id,
            start_time=info.start_time,
        )
        return DescribeWorkflowExecutionResponse(workflow_execution_info=shown)


class ShutdownWorker(Call[ShutdownWorkerRequest, ShutdownWorkerResponse]):
    """The SDK's worker says that it stops, which concerns workflows only."""

    request, response = ShutdownWorkerRequest, ShutdownWorkerResponse
    forwarded = False

    def check(self, request: ShutdownWorkerRequest) -> ShutdownWorkerRequest:
        return request


CALLS: Final[dict[str, type[Call[Any, Any]]]] = {
    call.__name__: call
    for call in (
        GetSystemInfo,
        DescribeNamespace,
        PollActivityTaskQueue,
        RecordActivityTaskHeartbeat,
        RespondActivityTaskCompleted,
        RespondActivityTaskFailed,
        RespondActivityTaskCanceled,
        SignalWorkflowExecution,
        UpdateWorkflowExecution,
        PollWorkflowExecutionUpdate,
        DescribeWorkflowExecution,
        ShutdownWorker,
    )
}
"""All calls, by the name of their method."""
