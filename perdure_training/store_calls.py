"""Calls to the store of the job through the node's agent: repeats, timeouts and errors. It needs no torch.

A call has a number, and is sent again with the same one until it is answered: the store carries it out once.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence

from perdure_training.node_api.agent_client import Agent, AgentAway, AgentRefused, Json, pauses

try:
    from torch.distributed import DistStoreError
except ImportError:
    DistStoreError = RuntimeError

_LONGEST_HOLD = 20.0
"""Seconds for which the agent may keep a request without an answer."""
_SPARE = 10.0
"""Seconds, beyond that, for its answer to arrive on a busy machine."""


class StoreError(DistStoreError):  # pyrefly: ignore[invalid-inheritance]
    """The store has not carried out a call; the message says why."""


class StoreTimeout(StoreError):
    """What a call waited for has not come in time. A change may still be carried out later."""


class StoreSuperseded(StoreError):
    """A newer generation of the job's world has begun, and this rank belongs to an older one."""


class _Caller:
    """What makes a call at a time, known to the store by its name."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.sequence = 0


class StoreCalls:
    """This process's calls. Threads make theirs at the same time."""

    def __init__(self, agent: Agent, *, generation: int, lasting: bool) -> None:
        """Creates the object; nothing is sent before the first call.

        Args:
            agent: The node's agent.
            generation: The rank's generation.
            lasting: Whether the keys are those of the job instead of the generation's.
        """
        self._agent = agent
        self._generation = generation
        self._lasting = lasting
        self._lock = threading.Lock()
        self._free: list[_Caller] = []
        self._pid = os.getpid()

    def call(
        self,
        action: str,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        *,
        timeout: float,
        within_generation: int = 0,
        **fields: int,
    ) -> Json:
        """Makes a call, and returns the store's answer.

        Args:
            action: What to do with the keys: a `StoreAction` of docs/node-protocol.md.
            keys: The keys.
            values: Their values.
            timeout: Seconds to wait for other ranks, or for a control plane that is away.
            within_generation: The generation that the call waits in: in another one it returns, whatever the answer.
                0 for any.
            **fields: Further fields of the call.

        Raises:
            StoreTimeout: if there was no answer in time.
            StoreSuperseded: if a newer generation has begun.
            StoreError: if the call is refused.
        """
        if os.getpid() != self._pid:
            # Two processes must not share a caller, and the lock may have been held when this one was forked.
            self._lock, self._free, self._pid = threading.Lock(), [], os.getpid()
        with self._lock:
            caller = self._free.pop() if self._free else _Caller()
            caller.sequence += 1
        call: Json = {
            "client": caller.name,
            "sequence": caller.sequence,
            "action": action,
            "keys": list(keys),
            "values": [urlsafe_b64encode(value).decode() for value in values],
            "lasting": self._lasting,
            **fields,
        }
        try:
            return self._until_answered(call, timeout, within_generation)
        finally:
            with self._lock:
                self._free.append(caller)

    def _until_answered(self, call: Json, timeout: float, within_generation: int) -> Json:
        deadline = time.monotonic() + timeout
        problem = "the agent does not answer"
        missing: list[str] | None = None
        attempts = pauses()
        pause = next(attempts)
        while True:
            began = time.monotonic()
            hold = min(max(deadline - began, 0.0), _LONGEST_HOLD)
            body = {"generation": self._generation, "hold_s": hold, "call": call}
            try:
                answer = self._agent.post("/v1/store", body, within=hold + _SPARE)
            except AgentAway as error:
                problem = str(error)
            except AgentRefused as error:
                raise StoreError(str(error)) from None
            else:
                if answer["superseded"]:
                    raise StoreSuperseded(
                        f"a newer generation has begun, or another call of this rank: it is of generation "
                        f"{self._generation}"
                    )
                if answer["refused"]:
                    raise StoreError(answer["refused"])
                is_elsewhere = within_generation and answer["generation"] not in (0, within_generation)
                if not answer["waits"] or is_elsewhere:
                    return answer
                missing = answer["missing"]
            now = time.monotonic()
            if now >= deadline:
                raise StoreTimeout(_reason(call, timeout, missing, problem))
            if now - began < pause:
                # The agent is away, or holds as many requests as it can.
                time.sleep(min(pause, deadline - now))
                pause = next(attempts)


def values_of(answer: Json) -> list[bytes]:
    """Returns the values in an answer."""
    return [urlsafe_b64decode(value) for value in answer["values"]]


def _reason(call: Json, timeout: float, missing: list[str] | None, problem: str) -> str:
    if missing is None:
        return f"timeout after {timeout:g} s: {problem}"
    names = ", ".join(missing)
    if call["action"] == "AWAIT_JOINS":
        return f"timeout after {timeout:g} s: at barrier {call['keys'][0]!r} these ranks have not arrived: {names}"
    # torch's text for its own stores, which scripts may match.
    return f"wait timeout after {timeout * 1000:.0f}ms, keys: {names}"
