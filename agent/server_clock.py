"""The server's clock, as far as the agent can tell it: the times of all that it reports are on this one.

Jobs compare such times with their own, which is the server's: a look at hanging ranks that is old says nothing of now.
A machine's clock may be minutes off, and an age would be wrong by as much. So times are moved where a message leaves
the agent. What is compared on the machine itself stays on the machine's clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel
from temporalio import activity, worker

from perdure_training.node_api.bodies import RankExit

_SAMPLES: Final = 16
_IGNORED: Final = 2.0
"""Seconds of a difference that changes nothing: an activity may begin so late."""
_CHANGED: Final = 1.0
"""Seconds from which on a new estimate counts: so the times of one event stay the same in several messages."""
_IDENTITIES: Final = frozenset({"agent_started_at"})
"""Fields that are times, and only compared with themselves."""

_Reported = TypeVar("_Reported")


def _since_boot() -> float:
    """Seconds of a clock that nobody sets, and that continues while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ServerClock:
    """How far the machine's clock is from the server's. All calls are made in the event loop."""

    def __init__(self, *, machine: Callable[[], float] = time.time, steady: Callable[[], float] = _since_boot) -> None:
        """Creates the object.

        Args:
            machine: The machine's clock: seconds since the epoch.
            steady: A clock that is never set, in seconds.
        """
        self._machine = machine
        self._steady = steady
        self._samples = deque[float](maxlen=_SAMPLES)
        """The server's time at the zero of the steady clock, less the delay of an activity."""
        self._applied = 0.0

    def observe(self, handed_out: datetime) -> None:
        """Takes in the server's time when it handed out an activity that begins now."""
        self._samples.append(handed_out.timestamp() - self._steady())

    @property
    def ahead(self) -> timedelta:
        """How far the server's clock is ahead of the machine's; zero where that is not known, or hardly anything."""
        if self._samples:
            # The least delay counts: an activity may begin late.
            found = max(self._samples) + self._steady() - self._machine()
            if abs(found - self._applied) > _CHANGED:
                self._applied = found if abs(found) > _IGNORED else 0.0
        return timedelta(seconds=self._applied)

    def moved(self, reported: _Reported) -> _Reported:
        """Returns a message with its times on the server's clock."""
        return cast("_Reported", _moved(reported, self.ahead)) if self.ahead else reported


class ClockReader(worker.Interceptor):
    """Reads the server's clock from the activities that it hands out, and moves the times of their heartbeats."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock

    def intercept_activity(self, next: worker.ActivityInboundInterceptor) -> worker.ActivityInboundInterceptor:
        return _Inbound(next, self._clock)


class _Inbound(worker.ActivityInboundInterceptor):
    def __init__(self, next: worker.ActivityInboundInterceptor, clock: ServerClock) -> None:
        super().__init__(next)
        self._clock = clock

    def init(self, outbound: worker.ActivityOutboundInterceptor) -> None:
        super().init(_Outbound(outbound, self._clock))

    async def execute_activity(self, input: worker.ExecuteActivityInput) -> Any:
        self._clock.observe(activity.info().started_time)
        return await super().execute_activity(input)


class _Outbound(worker.ActivityOutboundInterceptor):
    def __init__(self, next: worker.ActivityOutboundInterceptor, clock: ServerClock) -> None:
        super().__init__(next)
        self._clock = clock

    def heartbeat(self, *details: Any) -> None:
        super().heartbeat(*map(self._clock.moved, details))


def _moved(value: object, by: timedelta) -> object:
    if isinstance(value, datetime):
        return value + by
    if isinstance(value, RankExit):
        return value if value.time is None else replace(value, time=value.time + by.total_seconds())
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields if name not in _IDENTITIES}
        moved = {name: _moved(field, by) for name, field in fields.items()}
        changed = {name: field for name, field in moved.items() if field is not fields[name]}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        moved = tuple(_moved(item, by) for item in items)
        return value if all(new is old for new, old in zip(moved, items, strict=True)) else moved
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, object]", value)
        return {name: _moved(item, by) for name, item in mapping.items()}
    return value
