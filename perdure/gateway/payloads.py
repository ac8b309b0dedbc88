"""Encryption at the gateway: it has the keys, so that no pod of a job needs any.

Agents send and receive plain payloads over TLS; what Temporal stores is encrypted, where the site has keys.
"""

from __future__ import annotations

import json

from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.failure.v1 import Failure
from temporalio.api.workflowservice.v1 import (
    PollActivityTaskQueueResponse,
    PollWorkflowExecutionUpdateResponse,
    RecordActivityTaskHeartbeatRequest,
    RespondActivityTaskCanceledRequest,
    RespondActivityTaskCompletedRequest,
    RespondActivityTaskFailedRequest,
    SignalWorkflowExecutionRequest,
    UpdateWorkflowExecutionRequest,
    UpdateWorkflowExecutionResponse,
)
from temporalio.converter import WorkflowSerializationContext

from perdure.base.encryption.codec import ENCRYPTED_FAILURE, PayloadEncryption


class GatewayPayloads:
    """Encrypts what agents send, and decrypts what they receive."""

    def __init__(self, encryption: PayloadEncryption) -> None:
        """Creates the object.

        Args:
            encryption: Of the site; without keys nothing is changed.
        """
        self._encryption = encryption

    async def encrypt(self, request: object, *, namespace: str, workflow: str) -> None:
        """Encrypts the payloads of a request, for the workflow that receives them."""
        if self._encryption.keys is None:
            return
        codec = self._of(namespace, workflow)
        match request:
            case SignalWorkflowExecutionRequest():
                await codec.encode_wrapper(request.input)
            case UpdateWorkflowExecutionRequest():
                await codec.encode_wrapper(request.request.input.args)
            case RecordActivityTaskHeartbeatRequest() | RespondActivityTaskCanceledRequest():
                await _encode(codec, request.details)
            case RespondActivityTaskCompletedRequest():
                await _encode(codec, request.result)
            case RespondActivityTaskFailedRequest():
                await _encode(codec, request.last_heartbeat_details)
                _hide_text(request.failure)
                await codec.encode_failure(request.failure)
            case _:
                pass

    async def decrypt(self, response: object, *, namespace: str, workflow: str) -> None:
        """Decrypts the payloads of a response.

        Args:
            response: Changed in place.
            namespace: The Temporal namespace.
            workflow: The ID of the workflow that received the request, where it named one.
        """
        if self._encryption.keys is None:
            return
        match response:
            case PollActivityTaskQueueResponse():
                codec = self._of(namespace, response.workflow_execution.workflow_id)
                await codec.decode_wrapper(response.input)
                await codec.decode_wrapper(response.heartbeat_details)
            case UpdateWorkflowExecutionResponse() | PollWorkflowExecutionUpdateResponse():
                codec = self._of(namespace, workflow)
                if response.outcome.HasField("success"):
                    await codec.decode_wrapper(response.outcome.success)
                elif response.outcome.HasField("failure"):
                    await codec.decode_failure(response.outcome.failure)
            case _:
                pass

    def _of(self, namespace: str, workflow: str) -> PayloadEncryption:
        return self._encryption.with_context(WorkflowSerializationContext(namespace=namespace, workflow_id=workflow))


async def _encode(codec: PayloadEncryption, payloads: Payloads) -> None:
    """Encrypts payloads; leaves a field without any unset."""
    if payloads.payloads:
        await codec.encode_wrapper(payloads)


def _hide_text(failure: Failure) -> None:
    """Moves the text of a failure, and of its causes, to where the codec encrypts it, as workers do."""
    text = {"message": failure.message, "stack_trace": failure.stack_trace}
    failure.encoded_attributes.CopyFrom(Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(text).encode()))
    failure.message, failure.stack_trace = ENCRYPTED_FAILURE, ""
    if failure.HasField("cause"):
        _hide_text(failure.cause)
