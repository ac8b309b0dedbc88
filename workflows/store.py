"""Store: the key-value store of one job, for its ranks' coordination.

Calls come in updates, several of one node at once. No update waits: a node whose calls wait for keys is notified by an
activity on its own queue, and sends them again. So a thousand nodes can wait without a request in progress.

Invariants:
    - All state is set in `__init__` and changed by the update without awaiting, so no call is lost or carried out twice
      when a run ends.
    - A node is notified until it has been reached or a newer generation has begun, across runs of the workflow.
    - It outlives the group that started it, and ends when its job has ended.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.contract import Message, StoreAnswers, StoreChanged, StoreRequest, StoreView
    from perdure.contract.names import STORE, node_task_queue, store_workflow_id
    from perdure.workflows import options
    from perdure.workflows.carrying import Packed, pack, unpack
    from perdure.workflows.companion import JobOwner, accompany, owner_of, refusal_of, start_companion
    from perdure.workflows.node_record import GroupInput
    from perdure.workflows.policy.diagnosis.claims import why_beyond
    from perdure.workflows.policy.services.store import (
        StoreState,
        Watch,
        answer_calls,
        nodes_to_notify,
        record_notification,
        view,
    )


class StoreInput(Message):
    """The argument of a Store."""

    owner: JobOwner
    uid: str
    state: StoreState = StoreState()


@workflow.defn(name=STORE)
class KeyValueStore:
    """The workflow of one job's store; see the module."""

    @workflow.init
    def __init__(self, store: StoreInput | Packed) -> None:
        self._input = unpack(store, StoreInput)
        self._state = self._input.state
        self._notifying: dict[str, asyncio.Task[None]] = {}

    @workflow.run
    async def run(self, store: StoreInput | Packed) -> StoreView:
        self._notify()
        ended = await accompany(self._input.owner)
        for task in self._notifying.values():
            task.cancel()
        if not ended:
            workflow.continue_as_new(pack(self._input.replace(state=self._state)))
        return view(self._state)

    @workflow.update(description="Calls of a node's ranks")
    def call(self, request: StoreRequest) -> StoreAnswers:
        try:
            self._state, answers = answer_calls(self._state, request)
        except Exception as error:
            raise refusal_of(error) from error
        self._notify()
        return StoreAnswers(calls=answers)

    @call.validator
    def _validate_call(self, request: StoreRequest) -> None:
        if request.sender.uid != self._input.uid:
            raise ApplicationError("the sender is not a node of this job")
        if refused := why_beyond(request.generation, newest=view(self._state).generation):
            raise ApplicationError(refused)

    @workflow.query(description="Keys, bytes and waiting nodes")
    def usage(self) -> StoreView:
        return view(self._state)

    def _notify(self) -> None:
        due = nodes_to_notify(self._state)
        for path in [path for path in self._notifying if path not in due]:
            # A newer generation has begun.
            self._notifying.pop(path).cancel()
        for path, watch in due.items():
            if len(self._notifying) >= options.STORE_NOTIFICATIONS:
                # The next are notified when one of these has been.
                break
            if path not in self._notifying:
                self._notifying[path] = asyncio.create_task(self._notify_node(path, watch))

    async def _notify_node(self, path: str, watch: Watch) -> None:
        try:
            await workflow.execute_activity(
                "store_changed",
                StoreChanged(node=watch.node),
                result_type=RawValue,
                task_queue=node_task_queue(watch.node),
                # The node may be away for long. Its calls wait, until it is back or a newer generation begins.
                start_to_close_timeout=options.STORE_NOTIFICATION,
                retry_policy=options.COMMAND_RETRY,
                summary=f"to node {watch.node.rank}.{watch.node.incarnation}: the store has changed",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                return
            # Another program serves the queue, or an agent that takes no such command: its calls come again anyway.
            workflow.logger.warning("node %s was not notified: %s", path, error.cause)
        self._notifying.pop(path, None)
        self._state = record_notification(self._state, path, watch.changes)
        self._notify()


async def start_store(group: GroupInput) -> None:
    """Starts the store of a group's job on behalf of the group; does nothing where it runs already."""
    await start_companion(
        STORE,
        StoreInput(owner=owner_of(group), uid=group.uid),
        owner=owner_of(group),
        workflow_id=store_workflow_id(group.job_id, group.uid),
        summary=f"store of {group.job_id}",
    )
