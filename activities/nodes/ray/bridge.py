"""Script that talks to a Ray cluster for the worker: in a process of its own, with nothing but Ray and the standard
library.

A call of Ray's client may hang, and its core ends the whole process when it loses the cluster. The worker ends this
process instead, and begins a new one. It needs Ray in the cluster's version, and so the interpreter may be another one.

It reads a call per line, `{"id", "call", …}`, and writes an answer per line, in any order.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
from ray.exceptions import RayActorError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_CALLS = 4096
"""Calls at a time, more than the worker makes: each watch has one, and one that ends nodes lasts for their grace
period. One that waited for the others would not be answered in time."""
_STARTED = "perdure/started/"
"""The prefix of the keys of the incarnations that have run, as `actor.py` writes them."""
_SETTLES = 5.0
"""Seconds until Ray reports how an actor ended that it does not list any more."""
_ANSWERS = 2.0
"""Seconds for which a node that is to end is asked whether it runs, if that is not known."""
_VANISHES = 10.0
"""Seconds until an actor that was killed is not listed any more."""
_UNREACHABLE = 60.0
"""Seconds for which a machine gets no new node after an actor on it could not be reached. Ray counts a machine that is
lost as one of its own for 15 s, and would start the next actor there."""


def _beside(name: str) -> Any:
    """Loads another module of this folder: the interpreter with Ray has nothing of the package."""
    found = importlib.util.spec_from_file_location(f"perdure_ray_{name}", Path(__file__).with_name(f"{name}.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def _actor_module() -> Any:
    """Loads the actor's module so that Ray carries its code to the machines."""
    module = _beside("actor")
    ray.cloudpickle.register_pickle_by_value(module)
    return module


naming = _beside("naming")
places = _beside("places")
tables = _beside("tables")
archives = _beside("archives")


_METHODS = ("describe_node", "leave", "wait")
"""The methods of a node's actor."""


class ForeignActor(Exception):
    """An actor of this name is not a node."""


class WrongEnvironment(Exception):
    """Ray takes no such runtime environment."""


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
        if self.facts["state"] == "pending" and self.started is not None and ray.wait([self.started], timeout=0)[0]:
            try:
                self.facts = {"state": "running", **tables.texts(ray.get(self.started), "host", "node_id")}
            except (RayActorError, ray.exceptions.RayError):
                # No more is heard of its start.
                self.started = None
        if self.facts["state"] != "gone" and ray.wait([self.ended], timeout=timeout)[0]:
            self.end(**tables.ending(self.ended))

    def changes(self) -> list[Any]:
        """Returns the calls that end when the actor's state changes."""
        started = [self.started] if self.facts["state"] == "pending" and self.started is not None else []
        return started + ([self.ended] if self.facts["state"] != "gone" else [])

    def end(self, *, unreachable: bool = False, **ending: Any) -> None:
        """Takes in how the actor has ended."""
        if unreachable:
            self.unreachable_at = time.monotonic()
        if drained := tables.drained(self.facts):
            ending |= {"reason": drained, "cause": "PREEMPTED"}
        self.facts = {**self.facts, "state": "gone", **ending}


class Bridge:
    """The calls that the worker makes."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        # Some of it runs on the cluster, where Ray's client connects to that.
        ray.cloudpickle.register_pickle_by_value(tables)
        self._actor_class = ray.remote(_actor_module().Node)
        self._tracked: dict[str, _Tracked] = {}
        self._raylets = tables.Raylets()
        self._places = places.Places(tables, names=self._names, unreachable=self._unreachable)
        self._lock = threading.RLock()
        self._turns = threading.Lock()
        """Held by one call that creates a node: many would have the others wait for the lock."""

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
        try:
            # Its values are checked here; those of each machine when Ray builds it there.
            ray.runtime_env.RuntimeEnv(**options.get("runtime_env", {}))
        except (TypeError, ValueError) as error:
            raise WrongEnvironment(str(error)) from error
        with self._turns, self._lock:
            if archive:
                archives.adopt(archive, group["prefix"])
            if (existing := self._find(name)) is None:
                self._settle(group["prefix"], index)
                placed, bundle = self._places.place(name, group, index, avoid)
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
            self._places.tidy(group["prefix"])
        return self._places.why_pending(group["prefix"]) if one.facts["state"] == "pending" else ""

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
        changes = [change for one in mine.values() for change in one.changes()]
        on = {one.facts.get("node_id", "") for one in mine.values() if one.facts["state"] == "running"}
        lost = self._raylets.wait(changes, on, timeout)
        draining = tables.draining()
        for name, one in mine.items():
            if (node := one.facts.get("node_id")) in draining and one.facts["state"] == "running":
                one.facts["drained"] = tables.in_words(draining[node])
            one.settle(0 if name in names else _SETTLES)
            if one.facts["state"] == "running" and one.facts.get("node_id") in lost:
                one.end(reason="its machine was lost: its raylet is gone", cause="MACHINE", unreachable=True)
            if name not in names and one.facts["state"] != "gone":
                one.facts = {**one.facts, "state": "gone", "reason": "its actor is gone", "cause": "UNKNOWN"}
        if waiting := {name for name, one in mine.items() if one.facts["state"] == "pending"}:
            reason = self._places.why_pending(prefix)
            misplaced = self._places.misplaced(prefix, waiting)
            for name in waiting - misplaced.keys():
                mine[name].facts["reason"] = reason
            for name, reason in misplaced.items():
                ray.kill(mine[name].handle, no_restart=True)
                mine[name].facts = {**mine[name].facts, "state": "gone", "reason": reason, "cause": "MACHINE"}
        return {name: one.facts for name, one in mine.items()}

    def end(self, *, names: list[str], grace: float, reason: str, save: bool = False) -> None:
        """Ends nodes: their commands get the grace period, and then their actors are killed."""
        handles: dict[str, Any] = {}
        for name in names:
            # An actor that is no node is none of the job's.
            with contextlib.suppress(ForeignActor):
                if (handle := self._find(name)) is not None:
                    handles[name] = handle
        with self._lock:
            # A worker or a connection that is new knows of none whether it runs.
            unknown = handles.keys() - self._tracked.keys()
            tracked = {name: self._track(name, handle) for name, handle in handles.items()}
        if started := [tracked[name].started for name in unknown]:
            ray.wait(started, num_returns=len(started), timeout=_ANSWERS, fetch_local=False)
        waiting: list[Any] = []
        for name, handle in handles.items():
            one = tracked[name]
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
            uid = prefix.split("/")[1]
            names = {name for name in self._names(rf".*-{uid}\d+") if self._is_node(name)}
            kept = self._places.release(prefix, names)
            if over:
                self._forget(prefix, names, everything=not kept)

    def tidy(self, *, prefix: str) -> None:
        """Removes the placement groups that nodes of a job have left, and that none will use."""
        with self._lock:
            self._places.tidy(prefix)

    def _forget(self, prefix: str, names: set[str], *, everything: bool) -> None:
        """Removes what is known of the actors of a job that are not listed any more, and with `everything` its keys."""
        mine = re.compile(rf".*-{prefix.split('/')[1]}\d+")
        for name in [name for name in self._tracked.keys() - names if mine.fullmatch(name)]:
            del self._tracked[name]
        if not everything:
            return
        archives.remove_those_of(prefix)
        for key in internal_kv._internal_kv_list(_STARTED):
            if mine.fullmatch(key.decode()):
                internal_kv._internal_kv_del(key)
        self._places.forget(mine)

    keep_part = staticmethod(archives.keep_part)
    is_adopted = staticmethod(archives.is_adopted)
    remove_archive = staticmethod(archives.remove)

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

    def _is_node(self, name: str) -> bool:
        """Returns whether an actor is a node, and no other's."""
        with contextlib.suppress(ForeignActor):
            return name in self._tracked or self._find(name) is not None
        return False

    def _find(self, name: str) -> Any:
        try:
            handle = ray.get_actor(name, self._namespace)
        except ValueError:
            return None
        if not all(hasattr(handle, method) for method in _METHODS):
            raise ForeignActor(f"an actor {name} that is no node exists in Ray's namespace {self._namespace}")
        return handle

    def _settle(self, prefix: str, rank: int) -> None:
        """Takes in what the earlier actors of a rank have answered: that their machine is gone, for example."""
        earlier = re.compile(rf".*-{rank}-{prefix.split('/')[1]}\d+")
        for name in filter(earlier.fullmatch, list(self._tracked)):
            self._tracked[name].settle(0)

    def _unreachable(self) -> set[str]:
        """Returns the nodes of Ray on which an actor could not be reached a moment ago."""
        since = time.monotonic() - _UNREACHABLE
        return {
            one.facts["node_id"]
            for one in self._tracked.values()
            if one.unreachable_at is not None and one.unreachable_at > since and "node_id" in one.facts
        }


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

    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        # The worker has ended. Ray's own shutdown may hang, and detached actors need none.
        os._exit(0)

    # From the beginning: a worker may end while Ray connects, which a silent cluster lets last indefinitely.
    threading.Thread(target=read, daemon=True).start()
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        bridge = Bridge(namespace)
    except Exception as error:
        answer({"id": 0, "error": str(error) or repr(error), "kind": type(error).__name__})
        os._exit(1)
    answer({"id": 0, "result": ray.__version__})
    calls = ThreadPoolExecutor(_CALLS)
    while True:
        calls.submit(serve, json.loads(requests.get()))


if __name__ == "__main__":
    main()
