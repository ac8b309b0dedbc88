"""Script that talks to a Ray cluster for the worker: in a process of its own, with nothing but Ray and the standard
library.

A call of Ray's client may hang, and its core ends the whole process when it loses the cluster. The worker ends this
process instead, and begins a new one. It needs Ray in the cluster's version, and so the interpreter may be another one.

It reads a call per line, `{"id", "call", …}`, and writes an answer per line, in any order.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is not installed where this is checked.

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
from ray.core.generated.common_pb2 import NodeDeathInfo
from ray.exceptions import RayActorError
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_CALLS = 512
"""Calls at a time: each watch has one, and a call that ends nodes lasts for their grace period."""
_CODE = "perdure/code/"
"""The prefix of the keys of the parts of jobs' code, as `actor.py` reads them."""
_OWNER = "perdure/code-of/"
"""The prefix of the keys that say which job has taken the code."""
_STARTED = "perdure/started/"
"""The prefix of the keys of the incarnations that have run, as `actor.py` writes them."""
_PLACED = "perdure/placed/"
"""The prefix of the keys of the nodes whose placement group has the name of another node of their machine."""
_SETTLES = 5.0
"""Seconds until Ray reports how an actor ended that it does not list any more."""
_VANISHES = 10.0
"""Seconds until an actor that was killed is not listed any more."""
_UNREACHABLE = 60.0
"""Seconds for which a machine gets no new node after an actor on it could not be reached. Ray counts a machine that is
lost as one of its own for 15 s, and would start the next actor there."""
_DRAINED = (NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED, NodeDeathInfo.AUTOSCALER_DRAIN_IDLE)
"""Reasons of a machine's death in Ray's table."""
_OUT_OF_MEMORY = re.compile(r"memory monitor|running low on memory|OutOfMemory")
"""Words of Ray's memory monitor. Of every process that was killed Ray says that the kernel may have lacked memory."""
_DETAIL = re.compile(r"\t|The actor died unexpectedly before finishing this task|^$")
"""Lines of Ray's errors that say nothing beyond the actor's name."""


def _actor_module() -> Any:
    """Loads the actor's module so that Ray carries its code to the machines."""
    path = Path(__file__).with_name("actor.py")
    found = importlib.util.spec_from_file_location("perdure_ray_actor", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return module


class ForeignActor(Exception):
    """An actor of this name is not a node."""


class NotYet(Exception):
    """A node has to wait for others."""


class _Tracked:
    """An actor, and the calls that end when it starts and when it ends."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.started = handle.describe_node.remote()
        self.ended = handle.wait.remote()
        self.facts: dict[str, Any] = {"state": "pending"}
        self.unreachable_at: float | None = None
        """When the actor could not be reached any more."""

    def settle(self, timeout: float) -> None:
        """Takes in what the actor has answered."""
        if self.facts["state"] == "pending" and ray.wait([self.started], timeout=0)[0]:
            with contextlib.suppress(RayActorError, ray.exceptions.RayError):
                self.facts = {"state": "running", **_texts(ray.get(self.started), "host", "node_id")}
        if self.facts["state"] != "gone" and ray.wait([self.ended], timeout=timeout)[0]:
            ending = _ending(self.ended)
            if ending.pop("unreachable", False):
                self.unreachable_at = time.monotonic()
            if drained := _drained(self.facts):
                ending |= {"reason": drained, "cause": "PREEMPTED"}
            self.facts = {**self.facts, "state": "gone", **ending}


class Bridge:
    """The calls that the worker makes."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._actor_class = ray.remote(_actor_module().Node)
        self._tracked: dict[str, _Tracked] = {}
        self._lock = threading.RLock()

    def create(
        self,
        *,
        name: str,
        options: dict[str, Any],
        group: dict[str, Any],
        index: int,
        avoid: list[str],
        archive: str,
        **node: Any,
    ) -> str:
        """Creates a node's placement group and actor unless they exist. Returns why the actor cannot run yet."""
        with self._lock:
            if archive:
                internal_kv._internal_kv_put(_OWNER + archive, group["prefix"])
            if (existing := self._find(name)) is None:
                placed, bundle = self._place(name, group, index, avoid)
                strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle)
                existing = self._actor_class.options(
                    name=name,
                    namespace=self._namespace,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=strategy,
                    **options,
                ).remote(name=name, **node)
            one = self._track(name, existing)
        return self._why_pending(group["prefix"]) if one.facts["state"] == "pending" else ""

    def look(self, *, pattern: str, prefix: str, timeout: float) -> dict[str, dict[str, Any]]:
        """Returns the state of each actor whose name matches, as soon as one changes or the time is up."""
        with self._lock:
            mine = {name: one for name, one in self._tracked.items() if re.fullmatch(pattern, name)}
        # Listed after those that are known: one that is created meanwhile is not missing here.
        names = self._names(pattern)
        with self._lock:
            for name in names - mine.keys():
                with contextlib.suppress(ValueError, ForeignActor):
                    mine[name] = self._track(name, self._find(name))
        waiting = [one.started for one in mine.values() if one.facts["state"] == "pending"]
        waiting += [one.ended for one in mine.values() if one.facts["state"] != "gone"]
        if waiting:
            ray.wait(waiting, timeout=timeout, fetch_local=False)
        else:
            time.sleep(timeout)
        draining = _draining()
        for name, one in mine.items():
            if (node := one.facts.get("node_id")) in draining and one.facts["state"] == "running":
                one.facts["drained"] = _in_words(draining[node])
            one.settle(0 if name in names else _SETTLES)
            if name not in names and one.facts["state"] != "gone":
                one.facts = {**one.facts, "state": "gone", "reason": "its actor is gone", "cause": "UNKNOWN"}
        if any(one.facts["state"] == "pending" for one in mine.values()):
            reason = self._why_pending(prefix)
            for one in mine.values():
                if one.facts["state"] == "pending":
                    one.facts["reason"] = reason
        return {name: one.facts for name, one in mine.items()}

    def end(self, *, names: list[str], grace: float, reason: str, save: bool = False) -> None:
        """Ends nodes: their commands get the grace period, and then their actors are killed."""
        handles: dict[str, Any] = {}
        for name in names:
            # An actor that is no node is none of the job's.
            with contextlib.suppress(ForeignActor):
                if (handle := self._find(name)) is not None:
                    handles[name] = handle
        waiting: list[Any] = []
        for name, handle in handles.items():
            with self._lock:
                one = self._track(name, handle)
            one.settle(0)
            if one.facts["state"] == "running":
                handle.leave.remote(reason, save)
                waiting.append(one.ended)
        if waiting:
            ray.wait(waiting, num_returns=len(waiting), timeout=grace, fetch_local=False)
        for handle in handles.values():
            ray.kill(handle, no_restart=True)
        deadline = time.monotonic() + _VANISHES
        while (left := self._names() & handles.keys()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            raise TimeoutError(f"Ray still lists {', '.join(sorted(left))} after they were killed")

    def leave(self, *, name: str, reason: str) -> None:
        """Has a node leave its job, with a checkpoint where the job stores them."""
        if (handle := self._find(name)) is not None:
            handle.leave.remote(reason, True)

    def release(self, *, prefix: str, over: bool) -> None:
        """Removes the placement groups of a job that hold no actor any more, and its keys once it is over."""
        with self._lock:
            names, kept = self._names(), 0
            for one in self._groups(prefix):
                if self._is_held(one["name"], names):
                    kept += 1
                else:
                    ray.util.remove_placement_group(ray.util.get_placement_group(one["name"]))
            if over:
                self._forget(prefix, names, everything=not kept)

    def _forget(self, prefix: str, names: set[str], *, everything: bool) -> None:
        """Removes what is known of the actors of a job that are not listed any more, and with `everything` its keys."""
        mine = re.compile(rf".*-{prefix.split('/')[1]}\d+")
        for name in [name for name in self._tracked.keys() - names if mine.fullmatch(name)]:
            del self._tracked[name]
        if not everything:
            return
        for key in internal_kv._internal_kv_list(_OWNER):
            if internal_kv._internal_kv_get(key) == prefix.encode():
                self.remove_archive(archive=key.decode().removeprefix(_OWNER))
        for key in (*internal_kv._internal_kv_list(_STARTED), *internal_kv._internal_kv_list(_PLACED)):
            if mine.fullmatch(key.decode()):
                internal_kv._internal_kv_del(key)

    def keep_part(self, *, archive: str, index: int, content: str) -> None:
        """Keeps a part of a job's code, in base64."""
        internal_kv._internal_kv_put(f"{_CODE}{archive}/{index:04}", base64.b64decode(content))

    def is_adopted(self, *, archive: str) -> bool:
        """Returns whether a job has taken the code."""
        return internal_kv._internal_kv_get(_OWNER + archive) is not None

    def remove_archive(self, *, archive: str) -> None:
        """Removes a job's code."""
        for key in internal_kv._internal_kv_list(f"{_CODE}{archive}/"):
            internal_kv._internal_kv_del(key)
        internal_kv._internal_kv_del(_OWNER + archive)

    def names(self, *, pattern: str) -> list[str]:
        """Returns the names of the actors that match."""
        return sorted(self._names(pattern))

    def _names(self, pattern: str = ".*") -> set[str]:
        listed = ray.util.list_named_actors(all_namespaces=True)
        names = (one["name"] for one in listed if one["namespace"] == self._namespace)
        return {name for name in names if re.fullmatch(pattern, name)}

    def _track(self, name: str, handle: Any) -> _Tracked:
        if handle is None:
            raise ValueError(name)
        if name not in self._tracked:
            self._tracked[name] = _Tracked(handle)
        return self._tracked[name]

    def _find(self, name: str) -> Any:
        try:
            handle = ray.get_actor(name, self._namespace)
        except ValueError:
            return None
        if not hasattr(handle, "describe_node"):
            raise ForeignActor(f"an actor {name} that is no node exists in Ray's namespace {self._namespace}")
        return handle

    def _place(self, name: str, group: dict[str, Any], index: int, avoid: list[str]) -> tuple[Any, int]:
        """Returns the placement group of a node, and the index of its bundle."""
        bundle, labels, gang = group["bundle"], group["labels"], group["gang"]
        first = self._group(group["name"], bundle, labels, number=gang)
        # The job may have been scaled since.
        gang = len(_table(first).get("bundles") or ()) or gang
        if index >= gang and _table(first).get("state") != "CREATED":
            raise NotYet(f"it waits for the first {gang} nodes: {self._why_pending(group['name'])}")
        taken = {int(place): node for place, node in _table(first).get("bundles_to_node_id", {}).items() if node}
        nodes = {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}
        unwanted = {node for node, one in nodes.items() if one["NodeManagerHostname"] in avoid}
        unwanted |= (_draining().keys() | self._unreachable()) & nodes.keys()
        others = {node for place, node in taken.items() if place != index}
        own = f"{group['name']}/{index}"
        moved: list[str] = []
        for one in self._groups(f"{group['name']}/"):
            on = {node for node in one.get("bundles_to_node_id", {}).values() if node}
            if not f"{one['name']}/".startswith(f"{own}/"):
                others |= on
            elif index < gang and on <= nodes.keys() - unwanted:
                moved.append(one["name"])
        if moved:
            return self._group(self._join(name, moved), bundle, labels), 0

        def has_room(apart: set[str]) -> bool:
            return any(_fits(bundle, nodes[node]["Resources"]) for node in nodes.keys() - apart)

        # Avoidance is a preference: it needs another machine that could hold the node.
        chooses = has_room(unwanted | others)
        if index < gang and (taken.get(index) not in unwanted or not chooses):
            return first, index
        apart = sorted((others | (unwanted if chooses else set())) & nodes.keys())
        label = {**labels, **({"ray.io/node-id": f"!in({','.join(apart)})"} if apart else {})}
        return self._group(f"{own}/{name}" if index < gang else own, bundle, label), 0

    def _join(self, name: str, moved: list[str]) -> str:
        """Returns the placement group to which a machine's nodes have moved. The roles of a machine that was given up
        move together: the first of them has made the group, and its name."""
        names = self._names()
        group = max(moved, key=lambda one: self._is_held(one, names))
        internal_kv._internal_kv_put(_PLACED + name, group.encode())
        return group

    def _is_held(self, group: str, names: set[str]) -> bool:
        """Returns whether a placement group holds one of the actors."""
        maker = "/".join(group.split("/")[6:])
        return any(
            not maker or name == maker or internal_kv._internal_kv_get(_PLACED + name) == group.encode()
            for name in names
            if re.fullmatch(_may_hold(group), name)
        )

    def _unreachable(self) -> set[str]:
        """Returns the nodes of Ray on which an actor could not be reached a moment ago."""
        since = time.monotonic() - _UNREACHABLE
        return {
            one.facts["node_id"]
            for one in self._tracked.values()
            if one.unreachable_at is not None and one.unreachable_at > since and "node_id" in one.facts
        }

    def _group(self, name: str, bundle: dict[str, float], labels: dict[str, str], *, number: int = 1) -> Any:
        try:
            return ray.util.get_placement_group(name)
        except ValueError:
            selectors = {"bundle_label_selector": [labels] * number} if labels else {}
            bundles = [bundle] * number
            return ray.util.placement_group(
                bundles, strategy="STRICT_SPREAD", name=name, lifetime="detached", **selectors
            )

    def _groups(self, prefix: str) -> list[dict[str, Any]]:
        return [
            one
            for one in placement_group_table().values()
            if one["name"].startswith(prefix) and one["state"] != "REMOVED"
        ]

    def _why_pending(self, prefix: str) -> str:
        for one in self._groups(prefix):
            if one["state"] != "CREATED":
                why = one.get("stats", {}).get("scheduling_state", "")
                demands = _demands(one["bundles"].values())
                return f"its placement group is {one['state']}{f' ({why})' if why else ''}: it demands {demands}"
        return "its bundle is reserved, and Ray starts its actor once no earlier node uses it"


def _may_hold(group: str) -> str:
    """Returns the pattern of the actors that a placement group is for."""
    parts = group.split("/")
    uid, roles, rank = parts[1], parts[4].split("+"), parts[5] if len(parts) > 5 else r"\d+"
    return rf".*-({'|'.join(roles)})-{rank}-{uid}\d+"


def _demands(bundles: Iterable[dict[str, float]]) -> str:
    """Returns the bundles in Ray's words, equal ones once: `8 x {"CPU": 1, "GPU": 1}`."""
    texts = Counter(
        json.dumps({name: int(number) if number == int(number) else number for name, number in one.items()})
        for one in bundles
    )
    return ", ".join(f"{number} x {text}" if number > 1 else text for text, number in texts.items())


def _table(group: Any) -> dict[str, Any]:
    return placement_group_table(group) or {}


def _fits(bundle: dict[str, float], resources: dict[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= number for name, number in bundle.items())


def _draining() -> dict[str, int]:
    """Returns the nodes that Ray drains, with their deadlines in milliseconds; Ray's public interface has none."""
    with contextlib.suppress(Exception):
        return dict(ray._private.state.state.get_draining_nodes())
    return {}


def _in_words(deadline: int) -> str:
    """Returns what is said of a machine that Ray drains. One that runs a node is not idle, so it is preempted."""
    until = f", until {datetime.fromtimestamp(deadline / 1000, UTC):%H:%M:%S} UTC" if deadline else ""
    return f"Ray drains its machine, which is preempted{until}"


def _drained(facts: dict[str, Any]) -> str:
    """Returns that the machine of an actor is or was drained, with the words of the drain once Ray's table has them:
    after the machine's death. Empty if it was not drained."""
    said = facts.get("drained", "")
    for node in ray.nodes() if "node_id" in facts else ():
        if node["NodeID"] == facts["node_id"] and node["DeathReason"] in _DRAINED:
            words = node["DeathReasonMessage"] or NodeDeathInfo.Reason.Name(node["DeathReason"])
            return f"{said or 'Ray drained its machine'}: {words}"
    return said


def _texts(answer: Any, *names: str) -> dict[str, str]:
    """Returns the named texts of an actor's answer. An actor of another owner may answer anything."""
    fields = answer if isinstance(answer, dict) else {}
    return {name: str(fields[name]) for name in names if name in fields}


def _ending(ended: Any) -> dict[str, Any]:
    """Returns why an actor ended, in Ray's words where Ray knows."""
    try:
        return {"reason": "", **_texts(ray.get(ended), "reason"), "cause": "UNKNOWN"}
    except ray.exceptions.RayError as error:
        return _meaning(error)


def _meaning(error: Any) -> dict[str, Any]:
    lines = [line.strip() for line in str(error).splitlines() if not _DETAIL.match(line)]
    text = " ".join(lines) or type(error).__name__
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        # What precedes the last line is the traceback of Ray's own code.
        return {"reason": f"its ray.runtime_env cannot be built: {lines[-1]}", "cause": "JOB", "refused": True}
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


def main() -> None:
    """`bridge.py ADDRESS NAMESPACE`."""
    address, namespace = sys.argv[1:]
    # Ray and its libraries print to standard output.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    writing = threading.Lock()

    def answer(content: dict[str, Any]) -> None:
        with writing:
            answers.write(json.dumps(content) + "\n")

    def serve(request: dict[str, Any]) -> None:
        number, call = request.pop("id"), request.pop("call")
        try:
            answer({"id": number, "result": getattr(bridge, call)(**request)})
        except Exception as error:
            answer({"id": number, "error": str(error) or repr(error), "kind": type(error).__name__})

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        bridge = Bridge(namespace)
    except Exception as error:
        answer({"id": 0, "error": str(error) or repr(error), "kind": type(error).__name__})
        os._exit(1)
    answer({"id": 0, "result": ray.__version__})
    calls = ThreadPoolExecutor(_CALLS)
    for line in sys.stdin:
        calls.submit(serve, json.loads(line))
    # The worker has ended. Ray's own shutdown may hang, and detached actors need none.
    os._exit(0)


if __name__ == "__main__":
    main()
