"""Plays Ray's tables for the bridge, as no test can hold Ray at such a moment: machines, groups, actors and keys."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.support.temporal_server import free_port

_MACHINE = {"CPU": 8.0, "GPU": 1.0}
"""What each machine has."""


class PlayedRay:
    """The tables of a cluster: machines, placement groups, actors and keys."""

    def __init__(self, *machines: str, port: int, closed_port: int) -> None:
        """Creates tables.

        Args:
            machines: of the cluster.
            port: of raylets, that takes connections.
            closed_port: of those that have died.
        """
        self.machines = list(machines)
        self.without_raylet: set[str] = set()
        self.port, self.closed_port = port, closed_port
        self.ports: dict[str, int] = {}
        """Of machines whose raylets have their own."""
        self.groups: dict[str, dict[str, Any]] = {}
        self.schedules = False
        """Groups wait for room, and bundles for another machine, which `schedule` gives to them."""
        self.actors: dict[str, SimpleNamespace] = {}
        self.keys: dict[str, bytes] = {}

    def place(self, bundles: list[Any], *, name: str, bundle_label_selector: Any = None, **_: Any) -> str:
        """Places each bundle of a new group on another machine, by the label of the machine's ID."""
        selector = bundle_label_selector[0] if bundle_label_selector else {}
        apart = selector.get("ray.io/node-id", "!in()").removeprefix("!in(").removesuffix(")").split(",")
        free = [machine for machine in self.machines if machine not in apart]
        places = {str(place): machine for place, machine in zip(range(len(bundles)), free, strict=False)}
        self.groups[name] = {
            "name": name,
            "state": "PENDING" if self.schedules else "CREATED",
            "bundles": dict(enumerate(bundles)),
            "bundles_to_node_id": dict.fromkeys(map(str, range(len(bundles))), "") if self.schedules else places,
            "apart": apart,
        }
        if self.schedules:
            self.schedule()
        return name

    def schedule(self) -> None:
        """Gives machines to the bundles of a group that have none or whose machine is no more, to all of them or none;
        to lost ones first."""
        waiting = [group for group in self.groups.values() if not self._is_whole(group)]
        for group in sorted(waiting, key=lambda group: group["state"] == "PENDING"):
            places = group["bundles_to_node_id"]
            kept = {place: machine for place, machine in places.items() if machine in self.machines}
            if group["state"] == "CREATED":
                group["state"] = "RESCHEDULING"
            places |= dict.fromkeys(places.keys() - kept.keys(), "")
            placed: dict[str, str] = {}
            for place in sorted(places.keys() - kept.keys()):
                need, used = group["bundles"][int(place)], {*kept.values(), *placed.values(), *group["apart"]}
                for machine, room in self.available().items():
                    if machine not in used and all(room[name] >= number for name, number in need.items()):
                        placed[place] = machine
                        break
            if len(kept) + len(placed) == len(places):
                places |= placed
                group["state"] = "CREATED"

    def _is_whole(self, group: dict[str, Any]) -> bool:
        return all(machine in self.machines for machine in group["bundles_to_node_id"].values())

    def machine_of(self, group: str, bundle: int) -> str:
        """The machine of a bundle that is still there; empty for none."""
        found = self.groups.get(group, {}).get("bundles_to_node_id", {}).get(str(bundle), "")
        return found if found in self.machines else ""

    def available(self) -> dict[str, dict[str, float]]:
        """What no group has taken of each machine."""
        free = {machine: dict(_MACHINE) for machine in self.machines}
        for group in self.groups.values():
            for place, machine in group["bundles_to_node_id"].items():
                for resource, number in group["bundles"][int(place)].items() if machine in free else ():
                    free[machine][resource] -= number
        return free

    def find(self, name: str) -> str:
        if name not in self.groups:
            raise ValueError(name)
        return name

    def actor(self, name: str, _: str) -> SimpleNamespace:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def make(self, *, name: str, scheduling_strategy: tuple[str, int], **_: Any) -> MagicMock:
        group, bundle = scheduling_strategy
        made = MagicMock()
        self.actors[name] = made
        made.place = scheduling_strategy
        made.machine = self.groups[group]["bundles_to_node_id"].get(str(bundle), "")
        return MagicMock(remote=lambda **_: made)

    def modules(self) -> dict[str, ModuleType]:
        """What the bridge imports of Ray."""
        ray: Any = MagicMock()
        ray.exceptions.RayActorError = ray.exceptions.RayError = type("RayError", (Exception,), {})
        ray.nodes = lambda: [
            {
                "NodeID": one,
                "NodeManagerHostname": one,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": self.closed_port if one in self.without_raylet else self.ports.get(one, self.port),
                "Alive": True,
                "DeathReason": 0,
                "Resources": dict(_MACHINE),
            }
            for one in self.machines
        ]
        ray.get_actor = self.actor
        ray.remote.return_value.options = self.make
        ray.wait.return_value = ([], [])
        ray.util.list_named_actors = lambda **_: [{"name": name, "namespace": "perdure"} for name in self.actors]
        ray.util.placement_group = self.place
        ray.util.get_placement_group = self.find
        ray.util.remove_placement_group = self.groups.pop
        ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
            group,
            placement_group_bundle_index,
        )
        ray._private.state.state.get_draining_nodes.return_value = {}
        ray._private.state.available_resources_per_node = self.available
        keys = ray.experimental.internal_kv
        keys._internal_kv_put = self.keys.__setitem__
        keys._internal_kv_get = self.keys.get
        keys._internal_kv_list = lambda prefix: [key.encode() for key in self.keys if key.startswith(prefix)]
        keys._internal_kv_del = lambda key: self.keys.pop(key.decode() if isinstance(key, bytes) else key, None)
        played: Any = SimpleNamespace(
            placement_group_table=lambda group=None: self.groups if group is None else self.groups[group]
        )
        # Only Ray's client runs what it wraps elsewhere.
        hook: Any = SimpleNamespace(client_mode_wrap=lambda function: function)
        return {
            "ray": ray,
            "ray._private.client_mode_hook": hook,
            "ray.cloudpickle": ray.cloudpickle,
            "ray.exceptions": ray.exceptions,
            "ray.experimental": ray.experimental,
            "ray.util.placement_group": played,
            "ray.util.scheduling_strategies": ray.util.scheduling_strategies,
            **dict.fromkeys(
                ("ray._private", "ray.util", "ray.core", "ray.core.generated", "ray.core.generated.common_pb2"), ray
            ),
        }


@contextmanager
def playing(*machines: str) -> Iterator[tuple[PlayedRay, Any]]:
    """Plays a cluster, and yields its tables and a bridge to it."""
    # Nothing takes the connections, of which there are many.
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as raylet, pytest.MonkeyPatch.context() as patch:
        played = PlayedRay(*machines, port=raylet.getsockname()[1], closed_port=free_port())
        for name, module in played.modules().items():
            patch.setitem(sys.modules, name, module)
        module = "perdure.activities.nodes.ray.bridge"
        patch.delitem(sys.modules, module, raising=False)
        # Played modules are none that can be reloaded.
        found = importlib.import_module(module)
        patch.setattr(found, "_actor_module", MagicMock())
        patch.setattr(found.places, "_SETTLES", -1.0)
        yield played, found.Bridge("perdure")
        sys.modules.pop(module, None)
