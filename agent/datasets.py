"""Exchanges with the job's datasets on behalf of the node's ranks: `POST /v1/datasets/NAME` on `agent.sock`.

The agent keeps nothing of a dataset: a rank says with each request what it holds, and holds enough for a while. So an
agent can be restarted at any time, and while Temporal is away ranks use what they hold, and then wait. Requests of
several ranks that arrive during an exchange are sent together by the next one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from perdure.agent.outbox import envelope
from perdure.agent.pump import NotNow, Pump, RefusedRequest
from perdure.agent.state import AgentState
from perdure.agent.transport import UpdateRefused
from perdure.contract.agents import AgentMessage
from perdure.contract.base import Message
from perdure.contract.datasets import (
    DATASET_NAME,
    DatasetAnswer,
    DatasetNeeded,
    DatasetParameters,
    DatasetRequest,
    ShardAnswer,
    ShardRequest,
    Term,
)
from perdure.contract.identity import NodeCredentials

ANSWER_WITHIN = 20.0
"""Seconds after which a rank has to ask again: its connection counts against those that the agent serves."""
_MOST_DATASETS = 32
"""Datasets that the ranks of a node exchange with at a time."""

Send = Callable[[str, DatasetRequest], Awaitable[DatasetAnswer]]


class RankRequest(Message):
    """The body of a rank's request: nothing is left out of it, since what it holds would be granted again."""

    parameters: DatasetParameters
    term: Term
    request: ShardRequest


@dataclass(frozen=True)
class _Waiting:
    body: RankRequest
    answer: asyncio.Future[ShardAnswer]


class Datasets:
    """The exchanges of one node.

    Invariant: a rank has at most one request in progress for each dataset; a newer one replaces it.
    """

    def __init__(
        self,
        node: NodeCredentials,
        *,
        send: Send,
        state: Callable[[], AgentState],
        to_group: Callable[[AgentMessage], None],
    ) -> None:
        """Creates the object.

        Args:
            node: The incarnation that this agent serves.
            send: Sends a request to a dataset of the job, as `ControlPlane.exchange` does.
            state: Returns the node's present state, by which requests are checked.
            to_group: Sends a message to the node's group.
        """
        self._node = node
        self._send_request = send
        self._state = state
        self._to_group = to_group
        self._waiting: dict[str, dict[int, _Waiting]] = {}
        self._pumps: dict[str, Pump[_Waiting]] = {}

    async def exchange(self, name: str, content: bytes) -> ShardAnswer:
        """Answers one request of a rank.

        Raises:
            RefusedRequest: if it is invalid, or about another rank than those of this node.
            NotNow: if the control plane did not answer in time.
        """
        body = self._read(name, content)
        if self._state().present_generation(body.term.generation) is None:
            return ShardAnswer(superseded=True)
        ranks = self._waiting.setdefault(name, {})
        one = _Waiting(body, asyncio.get_running_loop().create_future())
        before, ranks[body.request.rank] = ranks.get(body.request.rank), one
        if before is not None and not before.answer.done():
            before.answer.set_exception(NotNow("the rank has sent a newer request"))
        self._pump(name).start()
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await one.answer
        except TimeoutError:
            raise NotNow("the control plane has not answered yet") from None
        finally:
            one.answer.cancel()

    def waiting(self) -> dict[str, int]:
        """Returns how many ranks wait for an answer, by dataset."""
        return {name: sum(not one.answer.done() for one in ranks.values()) for name, ranks in self._waiting.items()}

    def _read(self, name: str, content: bytes) -> RankRequest:
        """Returns the request.

        Raises:
            RefusedRequest: if it is invalid.
        """
        if not re.fullmatch(DATASET_NAME, name):
            raise RefusedRequest(
                f"{name[:80]!r} is not the name of a dataset: a letter, then letters, digits, '.', '_', '-'"
            )
        if name not in self._waiting and len(self._waiting) >= _MOST_DATASETS:
            raise RefusedRequest(f"more than {_MOST_DATASETS} datasets at a time")
        try:
            body = RankRequest.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise RefusedRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        state = self._state()
        world, rank = state.world, body.request.rank
        if world is None or body.term.generation > world.generation:
            raise RefusedRequest(f"term.generation: {body.term.generation} is not a world of this node")
        is_present = state.present_generation(body.term.generation) is not None
        if is_present and not world.base_rank <= rank < world.base_rank + (state.processes or 1):
            raise RefusedRequest(f"request.rank: {rank} is not a rank of this node")
        return body

    def _pump(self, name: str) -> Pump[_Waiting]:
        if name not in self._pumps:
            for idle in [other for other, pump in self._pumps.items() if not pump.runs]:
                del self._pumps[idle]
            self._pumps[name] = Pump(
                f"dataset {name}",
                take=partial(self._next, name),
                send=partial(self._send, name),
                need=partial(self._need, name),
            )
        return self._pumps[name]

    def _next(self, name: str) -> list[_Waiting]:
        """Returns the requests that can be sent together: of one term, with the same parameters."""
        ranks = self._waiting.get(name, {})
        for rank, one in list(ranks.items()):
            if one.answer.done():
                del ranks[rank]
            elif self._state().present_generation(one.body.term.generation) is None:
                one.answer.set_result(ShardAnswer(superseded=True))
                del ranks[rank]
        if not ranks:
            self._waiting.pop(name, None)
        waiting = list(ranks.values())
        return [one for one in waiting if self._kind(one) == self._kind(waiting[0])]

    def _kind(self, one: _Waiting) -> tuple[int, DatasetParameters]:
        # All processes of a node are in its newest world.
        return one.body.term.rewinds, one.body.parameters

    async def _send(self, name: str, batch: Sequence[_Waiting]) -> None:
        first, state = batch[0].body, self._state()
        request = DatasetRequest(
            sender=self._node,
            parameters=first.parameters,
            term=Term(generation=state.generation, rewinds=first.term.rewinds),
            ranks=tuple(
                one.body.request.replace(continues=one.body.term.generation < state.generation) for one in batch
            ),
            keeps_processes=state.world is not None and state.world.keeps_processes,
        )
        try:
            answers = (await self._send_request(name, request)).ranks
        except UpdateRefused as error:
            answers = tuple(ShardAnswer(refused=str(error)) for _ in batch)
        for one, answer in zip(batch, answers, strict=True):
            if one.answer.done():
                continue
            if answer.superseded and request.keeps_processes:
                # Another node was in a newer world first. The process continues in it, once this node is, too.
                one.answer.set_exception(NotNow("the newest world has not reached this node yet"))
            else:
                one.answer.set_result(answer)

    def _need(self, name: str, batch: Sequence[_Waiting]) -> None:
        self._to_group(DatasetNeeded(**envelope(self._node), name=name, parameters=batch[0].body.parameters))
