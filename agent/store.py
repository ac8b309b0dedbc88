"""Calls the job's store on behalf of the node's ranks: `POST /v1/store` on `agent.sock`.

A call that waits for other ranks waits here, not at the server, and without a connection where many do: the rank asks
for its answer again and again, by the number of its call. The store notifies the node when something has changed, and
the agent sends the waiting calls once more. An agent that was restarted knows no calls; ranks send them again, and the
store recognizes those that it has carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pydantic import Field, ValidationError

from perdure.agent.notifier import Notifier
from perdure.agent.outbox import envelope
from perdure.agent.pump import NotNow, Pump, RefusedRequest
from perdure.agent.state import AgentState
from perdure.agent.transport import UpdateRefused
from perdure.contract.agents import AgentMessage
from perdure.contract.base import Message
from perdure.contract.identity import NodeCredentials
from perdure.contract.store import (
    LARGEST_CALL,
    MOST_CALLS,
    StoreAnswer,
    StoreAnswers,
    StoreCall,
    StoreNeeded,
    StoreRequest,
)

ANSWER_WITHIN = 20.0
"""Seconds after which a rank has to ask again."""
FIRST_ANSWER_WITHIN = 3.0
"""Seconds in which the store is given time to answer, however shortly a rank waits."""
SEND_AGAIN = 60.0
"""Seconds after which a call that waits is sent again without a notification: the store may have been restored from an
older backup, or started anew."""
_MOST_HELD = 24
"""Ranks whose connections are held until there is an answer: fewer than the agent's connections, since the launcher
needs one. Others have to ask again at once."""
_MOST_CALLERS = 1_024
"""Calls known at a time. A process has one for each thread that uses the store."""
_FORGET_AFTER = 60.0
"""Seconds after which a call is forgotten that its rank does not ask about any more."""

Send = Callable[[StoreRequest], Awaitable[StoreAnswers]]


class RankCall(Message):
    """The body of a rank's request."""

    generation: int = Field(ge=0)
    call: StoreCall
    hold_s: float = Field(default=ANSWER_WITHIN, ge=0)
    """Seconds for which the rank waits for the answer; afterwards it may ask again."""


@dataclass(eq=False)
class _Call:
    """A call that has no answer yet, or whose rank has not taken it."""

    started_in: int
    """The generation in which the rank's process was started."""
    call: StoreCall
    answer: StoreAnswer | None = None
    missing: StoreAnswer | None = None
    """The store's last answer that the call waits, and what for."""
    is_due: bool = True
    sent_at: float = 0.0
    sent_after: int = 0
    """The number of notifications before the call was sent."""
    sent_in: int = 0
    """The generation in which it was sent; 0 before that."""
    asked_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    held: int = 0
    """Requests that wait for the answer."""


class StoreRelay:
    """The calls of one node's ranks.

    Invariant: each client has one call; a newer one replaces it.
    """

    def __init__(
        self,
        node: NodeCredentials,
        *,
        send: Send,
        state: Callable[[], AgentState],
        changed: Notifier,
        to_group: Callable[[AgentMessage], None],
    ) -> None:
        """Creates the object.

        Args:
            node: The incarnation that this agent serves.
            send: Sends calls to the job's store, as `ControlPlane.call_store` does.
            state: Returns the node's present state.
            changed: Fires when that state has changed.
            to_group: Sends a message to the node's group.
        """
        self._node = node
        self._send_request = send
        self._state = state
        self._changed = changed
        self._to_group = to_group
        self._calls: dict[str, _Call] = {}
        self._notifications = 0
        self._pump = Pump[_Call]("the job's store", take=self._take, send=self._send, need=self._need)

    async def answer(self, content: bytes) -> StoreAnswer:
        """Answers one request of a rank; `waits` means that it has to ask again.

        Raises:
            RefusedRequest: if it is invalid.
            NotNow: if the control plane did not answer in time.
        """
        body = self._read(content)
        one = self._known(body)
        if one is None:
            return StoreAnswer(superseded=True)
        now = asyncio.get_running_loop().time()
        one.asked_at = now
        if one.answer is None and self._was_sent_in_older(one):
            one.is_due, one.sent_in, one.missing = True, 0, None
        one.is_due = one.is_due or (one.answer is None and now - one.sent_at >= SEND_AGAIN)
        if one.is_due:
            self._pump.start()
        if sum(call.held for call in self._calls.values()) < _MOST_HELD:
            one.held += 1
            try:
                hold = min(body.hold_s, ANSWER_WITHIN)
                await self._changed.wait_for(lambda: self._is_over(one), within=hold)
                # A rank that waits for other ranks for a moment only still learns what the store has answered.
                within = min(FIRST_ANSWER_WITHIN, ANSWER_WITHIN) - hold
                if within > 0:
                    await self._changed.wait_for(lambda: self._is_over(one) or one.missing is not None, within=within)
            finally:
                one.held -= 1
        is_newest = self._calls.get(body.call.client) is one
        if one.answer is not None:
            if is_newest:
                del self._calls[body.call.client]
            return one.answer
        if not is_newest or self._is_old(one):
            return StoreAnswer(superseded=True)
        if one.missing is None:
            raise NotNow("the control plane has not answered yet")
        return one.missing

    def notify(self) -> None:
        """Records that the store has changed: calls that wait are sent again."""
        self._notifications += 1
        for one in self._calls.values():
            one.is_due = one.answer is None
        self._pump.start()

    def _read(self, content: bytes) -> RankCall:
        try:
            body = RankCall.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise RefusedRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        world = self._state().world
        if world is None or body.generation > world.generation:
            raise RefusedRequest(f"generation: {body.generation} is not a world of this node")
        return body

    def _known(self, body: RankCall) -> _Call | None:
        """Returns the client's call; None if it has sent a newer one."""
        client, sequence = body.call.client, body.call.sequence
        known = self._calls.get(client)
        if known is not None and sequence < known.call.sequence:
            return None
        if known is None or sequence > known.call.sequence:
            if known is None and len(self._calls) >= _MOST_CALLERS:
                self._forget()
            if known is None and len(self._calls) >= _MOST_CALLERS:
                raise RefusedRequest(f"client: more than {_MOST_CALLERS} callers at a time")
            known = self._calls[client] = _Call(body.generation, body.call)
            self._changed.fire()
        return known

    def _forget(self) -> None:
        """Forgets calls that no rank asks about any more."""
        now = asyncio.get_running_loop().time()
        for client, one in list(self._calls.items()):
            if not one.held and (now - one.asked_at >= _FORGET_AFTER or self._is_old(one)):
                del self._calls[client]

    def _is_old(self, one: _Call) -> bool:
        return self._state().present_generation(one.started_in) is None

    def _was_sent_in_older(self, one: _Call) -> bool:
        """Whether the store has taken the call, or refused it, in a generation that is over, while its process
        continues."""
        return 0 < one.sent_in < self._state().generation

    def _is_over(self, one: _Call) -> bool:
        is_newest = self._calls.get(one.call.client) is one
        return one.answer is not None or not is_newest or self._is_old(one) or self._was_sent_in_older(one)

    def _take(self) -> Sequence[_Call]:
        """Returns the calls that are sent together."""
        self._forget()
        batch: list[_Call] = []
        room = LARGEST_CALL
        for one in self._calls.values():
            if one.is_due and not self._is_old(one) and one.call.weight <= room and len(batch) < MOST_CALLS:
                batch.append(one)
                room -= one.call.weight
        return batch

    async def _send(self, batch: Sequence[_Call]) -> None:
        # All processes of a node are in its newest world.
        generation = self._state().generation
        now = asyncio.get_running_loop().time()
        for one in batch:
            one.sent_after, one.sent_at, one.sent_in = self._notifications, now, generation
        request = StoreRequest(sender=self._node, generation=generation, calls=tuple(one.call for one in batch))
        try:
            answers = (await self._send_request(request)).calls
        except UpdateRefused as error:
            answers = tuple(StoreAnswer(refused=str(error)) for _ in batch)
        is_over = self._state().generation > generation
        for one, answer in zip(batch, answers, strict=True):
            if answer.waits:
                one.missing = answer.replace(generation=generation)
                # What it waits for may have come while the answer was on its way.
                one.is_due = self._notifications > one.sent_after or is_over
            elif answer.superseded and self._keeps_processes:
                # Another node was in a newer world first. The process continues in it, once this node is, too.
                one.is_due = is_over
            elif not answer.later:
                one.answer, one.is_due = answer.replace(generation=generation), False
        self._changed.fire()

    @property
    def _keeps_processes(self) -> bool:
        world = self._state().world
        return world is not None and world.keeps_processes

    def _need(self, batch: Sequence[_Call]) -> None:
        self._to_group(StoreNeeded(**envelope(self._node)))
