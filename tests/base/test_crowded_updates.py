"""Tests of updates that hundreds may send at once: how the SDK repeats them decides whether any is carried out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.enums.v1 import UpdateWorkflowExecutionLifecycleStage as Stage
from temporalio.api.workflowservice.v1 import UpdateWorkflowExecutionResponse
from temporalio.client import Client
from temporalio.service import ConnectConfig, RPCError, RPCStatusCode, ServiceClient

from perdure.base.executions import update, update_in_crowd

FULL = RPCError(
    "limit on number of concurrent in-flight updates has been reached (10)", RPCStatusCode.RESOURCE_EXHAUSTED, b""
)
DROPPED = RPCError("workflow update was aborted", RPCStatusCode.UNAVAILABLE, b"")
AWAY = RPCError("connection refused", RPCStatusCode.UNAVAILABLE, b"")


class Server(ServiceClient):
    """Answers each call with the next of the given errors, and afterwards with a result."""

    def __init__(self, *errors: RPCError) -> None:
        super().__init__(ConnectConfig(target_host="nowhere:1", lazy=True))
        self.errors = list(errors)
        self.repeats: list[bool] = []

    @property
    def worker_service_client(self) -> Any:
        raise NotImplementedError

    def update_rpc_metadata(self, metadata: Any) -> None:
        raise NotImplementedError

    def update_api_key(self, api_key: str | None) -> None:
        raise NotImplementedError

    async def _rpc_call(self, rpc: str, req: Any, resp_type: Any, *, retry: bool, **_: Any) -> Any:
        self.repeats.append(retry)
        if self.errors:
            raise self.errors.pop(0)
        response = UpdateWorkflowExecutionResponse(
            stage=Stage.Value("UPDATE_WORKFLOW_EXECUTION_LIFECYCLE_STAGE_COMPLETED")
        )
        response.outcome.success.payloads.add(metadata={"encoding": b"json/plain"}, data=b'"done"')
        return response


ARGUMENTS: dict[str, Any] = {"args": [], "update_id": "a", "rpc_timeout": timedelta(seconds=1)}


async def send(server: Server) -> str:
    client = Client(server, namespace="default")
    return await update_in_crowd(client, "job", "join", result_type=str, **ARGUMENTS)


@pytest.mark.parametrize("refusal", [FULL, DROPPED], ids=["above-the-limit", "dropped"])
async def test_the_sdk_does_not_repeat_a_crowded_update_that_the_server_has_no_room_for(refusal: RPCError) -> None:
    server = Server(refusal)
    with pytest.raises(RPCError, match=refusal.message[:20]):
        await send(server)
    assert server.repeats == [False]


async def test_a_crowded_update_outlasts_a_lost_connection_like_any_other() -> None:
    server = Server(AWAY)
    assert await send(server) == "done"
    assert server.repeats == [False, True]


async def test_the_sdk_repeats_other_updates() -> None:
    server = Server()
    handle = Client(server, namespace="default").get_workflow_handle("job")
    assert await update(handle, "scale", result_type=str, **ARGUMENTS) == "done"
    assert server.repeats == [True]
