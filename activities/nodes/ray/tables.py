"""What Ray's tables, raylets and errors say of machines, placement groups, and actors that have ended: a part of the
bridge."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import ray
from ray._private.client_mode_hook import client_mode_wrap
from ray.core.generated.common_pb2 import NodeDeathInfo
from ray.util.placement_group import placement_group_table

_CONNECTS = 1.0
"""Seconds for a connection to a raylet."""
_OTHERS = 3
"""Machines that show whether the worker reaches raylets at all."""
_SLICE = 0.2
"""Seconds between two looks at the connections to raylets."""
_QUIET = 60.0
"""Seconds without a new connection after one that was not answered: a worker outside of the cluster's network may reach
no raylet, and each try takes `_CONNECTS`."""
_LEAST = 0.0001
"""The smallest amount of a resource that Ray knows."""
_DRAINED = (NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED, NodeDeathInfo.AUTOSCALER_DRAIN_IDLE)
_OUT_OF_MEMORY = re.compile(r"memory monitor|running low on memory|OutOfMemory")
"""Words of Ray's memory monitor. Of every process that was killed Ray says that the kernel may have lacked memory."""
_LIMIT = re.compile(r"Failed to install runtime_env within the timeout of [\d.]+ seconds")
"""Ray's words for an environment that takes too long."""
_DETAIL = re.compile(r"\t|The actor died unexpectedly before finishing this task|^$")
"""Lines of Ray's errors that say nothing beyond the actor's name."""


def machines() -> dict[str, Any]:
    """Returns Ray's living nodes by their IDs."""
    return {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}


def table(group: Any) -> dict[str, Any]:
    return placement_group_table(group) or {}


def demands(bundles: Iterable[dict[str, float]]) -> str:
    """Returns the bundles in Ray's words, equal ones once: `8 x {"CPU": 1, "GPU": 1}`."""
    texts = Counter(
        json.dumps({name: int(number) if number == int(number) else number for name, number in one.items()})
        for one in bundles
    )
    return ", ".join(f"{number} x {text}" if number > 1 else text for text, number in texts.items())


def available() -> dict[str, dict[str, float]]:
    """Returns what no placement group has taken of each machine, as Ray knew it up to a second ago. Ray's public
    interface has only the sum."""
    with contextlib.suppress(AttributeError):
        return _available()
    return {name: one["Resources"] for name, one in machines().items()}


@client_mode_wrap
def _available() -> dict[str, dict[str, float]]:
    """Runs on the cluster where Ray's client connects to it, which reads no such tables itself."""
    return dict(ray._private.state.available_resources_per_node())


def fits(bundle: dict[str, float], resources: dict[str, float]) -> bool:
    return all(resources.get(name, 0.0) > number - _LEAST for name, number in bundle.items())


def without_raylet(machine: str | None, nodes: dict[str, Any]) -> set[str]:
    """Returns the machine if its raylet is gone, which Ray learns seconds later, and else nothing.

    Silence says nothing: the worker may reach no machine. Neither does a refusal where no machine's raylet answers.
    """
    if machine not in nodes or _answers(nodes[machine]) is not False:
        return set()
    others = itertools.islice((node for name, node in nodes.items() if name != machine), _OTHERS)
    return {machine} if any(_answers(node) for node in others) else set()


def _answers(node: dict[str, Any]) -> bool | None:
    try:
        _connect(node).close()
    except OSError as error:
        return False if isinstance(error, ConnectionRefusedError) else None
    return True


class Raylets:
    """Idle connections to the raylets of machines.

    One ends with its raylet, whose actors end with it; Ray tells of these 2 s later, and of the machine after 15 s.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, socket.socket | None] = {}
        """By machine; None for one that cannot be reached from here, whose silence says nothing."""
        self._quiet_until = 0.0

    def wait(self, calls: Sequence[Any], machines: Iterable[str], timeout: float) -> set[str]:
        """Waits until one of the calls has ended, the raylet of a machine is gone, or the time is up. Returns the
        machines."""
        watched, deadline = set(machines), time.monotonic() + timeout
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            if not calls:
                time.sleep(min(left, _SLICE))
            elif ray.wait(list(calls), timeout=min(left, _SLICE), fetch_local=False)[0]:
                return set()
            if (gone := {machine for machine in watched if self._is_gone(machine)}) or left <= _SLICE:
                return gone

    def _is_gone(self, machine: str) -> bool:
        with self._lock:
            known = self._open.get(machine)
            if machine in self._open and (known is None or not _has_ended(known)):
                return False
            if known is not None:
                known.close()
            elif time.monotonic() < self._quiet_until:
                return False
            nodes = machines()
            if machine in nodes:
                try:
                    self._open[machine] = _connect(nodes[machine])
                    return False
                except OSError:
                    if without_raylet(machine, nodes):
                        self._open.pop(machine, None)
                        return True
                    self._quiet_until = time.monotonic() + _QUIET
            self._open[machine] = None
            return False


def _connect(node: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _CONNECTS)
    connection.setblocking(False)
    return connection


def _has_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def draining() -> dict[str, int]:
    """Returns the nodes that Ray drains, with their deadlines in milliseconds; Ray's public interface has none."""
    with contextlib.suppress(AttributeError):
        return _draining()
    return {}


@client_mode_wrap
def _draining() -> dict[str, int]:
    """As `_available`."""
    return dict(ray._private.state.state.get_draining_nodes())


def in_words(deadline: int) -> str:
    """Returns what is said of a machine that Ray drains. One that runs a node is not idle, so it is preempted."""
    until = f", until {datetime.fromtimestamp(deadline / 1000, UTC):%H:%M:%S} UTC" if deadline else ""
    return f"Ray drains its machine, which is preempted{until}"


def drained(facts: dict[str, Any]) -> str:
    """Returns that the machine of an actor is or was drained, with the words of the drain once Ray's table has them:
    after the machine's death. Empty if it was not drained."""
    said = facts.get("drained", "")
    for node in ray.nodes() if "node_id" in facts else ():
        if node["NodeID"] == facts["node_id"] and node["DeathReason"] in _DRAINED:
            words = node["DeathReasonMessage"] or NodeDeathInfo.Reason.Name(node["DeathReason"])
            return f"{said or 'Ray drained its machine'}: {words}"
    return said


def texts(answer: Any, *names: str) -> dict[str, str]:
    """Returns the named texts of an actor's answer. An actor of another owner may answer anything."""
    fields: dict[str, Any] = answer if isinstance(answer, dict) else {}
    return {name: str(fields[name]) for name in names if name in fields}


def ending(ended: Any) -> dict[str, Any]:
    """Returns why an actor ended, in Ray's words where Ray knows."""
    try:
        return {"reason": "", **texts(ray.get(ended), "reason"), "cause": "UNKNOWN"}
    except ray.exceptions.RayError as error:
        return _meaning(error)


def _meaning(error: Any) -> dict[str, Any]:
    lines = [line.strip() for line in str(error).splitlines() if not _DETAIL.match(line)]
    text = " ".join(lines) or type(error).__name__
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        # What precedes the last line is the traceback of Ray's own code; that of a limit has no words.
        limit = _LIMIT.search(text)
        said = f"{limit[0]}; raise config.setup_timeout_seconds in it" if limit else lines[-1]
        return {"reason": f"its ray.runtime_env cannot be built: {said}", "cause": "JOB", "refused": True}
    if getattr(error, "actor_init_failed", False):
        return {"reason": f"it could not start: {lines[-1]}", "cause": "UNKNOWN"}
    if isinstance(error, ray.exceptions.OutOfMemoryError) or _OUT_OF_MEMORY.search(text):
        return {"reason": f"its machine ran out of memory: {text}", "cause": "EVICTED"}
    if getattr(error, "preempted", False):
        return {"reason": f"its machine was preempted: {text}", "cause": "PREEMPTED"}
    if "node has died" in text or "node was terminated" in text:
        return {"reason": f"its machine was lost: {text}", "cause": "MACHINE"}
    if "ray.kill" in text or "placement group" in text:
        return {"reason": f"it was removed: {text}", "cause": "WANTED"}
    return {"reason": text, "cause": "UNKNOWN", "unreachable": isinstance(error, ray.exceptions.ActorUnavailableError)}
