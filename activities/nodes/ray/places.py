"""Where a job's nodes run on a Ray cluster: its placement groups and their bundles. A part of the bridge.

Ray counts a lost machine as one of its own for 15 s, and then reserves its bundles elsewhere. A node does not wait for
that: it moves into a group of its own where a machine has room. Ray reserves the bundle that it has left all the same,
and whichever node loses its machine next uses that.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from perdure_ray_naming import names_of
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group_table

_PLACED = "perdure/placed/"
"""The prefix of the keys of the nodes whose place does not follow from their names: `GROUP` or `GROUP#BUNDLE`."""
_PARTS = 5
"""The parts of the name of a first group: `perdure/<uid>/<namespace>/<job>/<roles>`."""
_SETTLES = 2.0
"""Seconds in which Ray gives a machine that has room to the bundles that it has lost, if there is room for all."""
_INSISTS = 60.0
"""Seconds for which a node without a machine rather waits than use one that it avoids."""


class NotYet(Exception):
    """A node has to wait for others."""


@dataclass(frozen=True, order=True)
class Place:
    """A bundle of a placement group."""

    group: str
    bundle: int = 0


class Layout:
    """The places of a role's nodes, or of roles that share them, as Ray's tables had them when this was made."""

    def __init__(self, first: str, groups: Iterable[Mapping[str, Any]], living: Iterable[str]) -> None:
        """Reads the tables.

        Args:
            first: the name of the first group.
            groups: placement groups, also those of others.
            living: the names of the actors.
        """
        self.first = first
        self._groups = {one["name"]: one for one in groups if f"{one['name']}/".startswith(f"{first}/")}
        self.gang = len(self._groups.get(first, {}).get("bundles") or ())
        """The number of the first nodes, each of which has a bundle of the first group."""
        mine = re.compile(_may_hold(first))
        keys = {key.decode().removeprefix(_PLACED) for key in internal_kv._internal_kv_list(_PLACED)}
        self.places = {name: self._place(name, name in keys) for name in living if mine.fullmatch(name)}
        """Of each actor."""

    def _place(self, name: str, has_key: bool) -> Place:
        rank = _rank_of(name)
        key = (internal_kv._internal_kv_get(_PLACED + name) or b"").decode() if has_key else ""
        if key:
            group, _, bundle = key.partition("#")
            return Place(group, int(bundle or 0))
        own = f"{self.first}/{rank}"
        return Place(f"{own}/{name}") if f"{own}/{name}" in self._groups else self.default(rank)

    def default(self, rank: int) -> Place:
        """Returns the place of a node that has always had a machine."""
        return Place(self.first, rank) if rank < self.gang else Place(f"{self.first}/{rank}")

    def machine(self, place: Place) -> str:
        """Returns the machine of a place; empty for none."""
        bundles = self._groups.get(place.group, {}).get("bundles_to_node_id", {})
        return {int(bundle): machine for bundle, machine in bundles.items()}.get(place.bundle) or ""

    def is_lost(self, place: Place) -> bool:
        """Returns whether Ray looks for a machine in place of a lost one: for all bundles of the group that have lost
        theirs, or for none of them."""
        return self.state(place.group) == "RESCHEDULING" and not self.machine(place)

    def bundle(self, place: Place) -> dict[str, float]:
        bundles = self._groups.get(place.group, {}).get("bundles", {})
        return {int(number): one for number, one in bundles.items()}.get(place.bundle) or {}

    def state(self, group: str) -> str:
        return self._groups.get(group, {}).get("state", "")

    def obstacles(self, place: Place, lost: set[str]) -> tuple[bool, bool, bool]:
        """Returns what keeps a node from starting in a place, the worst first."""
        machine = self.machine(place)
        return machine in lost, not machine, not self.state(place.group)

    def own_groups(self) -> Iterator[tuple[int, str]]:
        """Yields the groups beside the first, each after the rank that it is for."""
        for name in self._groups:
            if name != self.first:
                yield int(name.removeprefix(f"{self.first}/").partition("/")[0]), name

    def own_places(self, rank: int) -> list[Place]:
        """Returns the places that were made for a rank after it had lost a machine."""
        return [
            place for one, group in self.own_groups() if one == rank and (place := Place(group)) != self.default(rank)
        ]

    def is_held(self, group: str) -> bool:
        """Returns whether an actor has its place in a group."""
        return any(place.group == group for place in self.places.values())

    def is_shared(self, group: str, name: str) -> bool:
        """Returns whether an actor of another role than this one's has its place in a group."""
        node = _node_of(name)
        return any(place.group == group and _node_of(other) != node for other, place in self.places.items())

    def of_others(self, rank: int) -> set[Place]:
        """Returns the places of all other ranks. One without an actor will want its bundle of the first group."""
        used = {place for name, place in self.places.items() if _rank_of(name) != rank}
        absent = set(range(self.gang)) - {_rank_of(name) for name in self.places} - {rank}
        return used | {self.default(one) for one in absent}

    def free_bundles(self, rank: int) -> list[Place]:
        """Returns the bundles that a rank may use: its own, and those of the first group whose ranks have moved."""
        mine = {place for name, place in self.places.items() if _rank_of(name) == rank and place.group == self.first}
        first = [Place(self.first, bundle) for bundle in range(self.gang)]
        used = self.of_others(rank)
        return [place for place in dict.fromkeys((*sorted(mine), self.default(rank), *first)) if place not in used]

    def apart(self, rank: int) -> set[str]:
        """Returns the machines of the other ranks."""
        return {self.machine(place) for place in self.of_others(rank)} - {""}


class Places:
    """Gives each node its place.

    Invariants:
        - No two ranks share a bundle; the roles of one rank that are collocated do.
        - A group of a rank's own is made only if a machine has room for it at once. Otherwise the rank waits for a
          bundle of the first group, so that nothing is demanded of Ray, and of its autoscaler, twice.
        - A rank's own group ends when no actor holds it and its machine is lost, or the rank has moved on.
        - No node waits for a machine in one place while it may use another that has a machine (`misplaced`).
    """

    def __init__(self, tables: Any, *, names: Callable[[str], set[str]], unreachable: Callable[[], set[str]]) -> None:
        """Reads Ray's tables at each call.

        Args:
            tables: the module of that name.
            names: lists the actors whose names match a pattern.
            unreachable: names the machines whose actors could not be reached a moment ago.
        """
        self._tables = tables
        self._names = names
        self._unreachable = unreachable
        self._avoids: dict[str, tuple[float, frozenset[str]]] = {}
        """Of nodes that were placed: when, and the hosts that they avoid."""
        self._room_since: dict[str, float] = {}
        """Of nodes whose bundle is lost: since when a machine has room for it."""

    def place(self, name: str, group: dict[str, Any], index: int, avoid: list[str]) -> tuple[Any, int]:
        """Returns the placement group of a node, and the index of its bundle.

        Args:
            name: of the node.
            group: as `placement.group_of` describes it.
            index: the node's rank.
            avoid: hosts to avoid where another has room.

        Raises:
            NotYet: if the first nodes have no machines yet, and this is none of them.
        """
        first, bundle, labels = group["name"], group["bundle"], group["labels"]
        self._make(first, bundle, labels, number=group["gang"])
        layout = self._layout(first)
        if index >= layout.gang and layout.state(first) not in ("CREATED", "RESCHEDULING"):
            raise NotYet(f"it waits for the first {layout.gang} nodes: {self.why_pending(first)}")
        nodes = self._tables.machines()
        lost = self._lost(layout, index, nodes)
        avoided = {machine for machine, one in nodes.items() if one["NodeManagerHostname"] in avoid}
        self._avoids[name] = (time.monotonic(), frozenset(avoid))
        place, apart = self._choose(layout, name, index, bundle, nodes, lost, avoided)
        if place == layout.default(index) or place.group.endswith(f"/{name}"):
            internal_kv._internal_kv_del(_PLACED + name)
        else:
            number = f"#{place.bundle}" if place.group == first else ""
            internal_kv._internal_kv_put(_PLACED + name, f"{place.group}{number}".encode())
        selector = {"ray.io/node-id": f"!in({','.join(sorted(apart))})"} if apart else {}
        return self._make(place.group, bundle, {**labels, **selector}), place.bundle

    def _choose(
        self,
        layout: Layout,
        name: str,
        index: int,
        bundle: dict[str, float],
        nodes: Mapping[str, Any],
        lost: set[str],
        avoided: set[str],
    ) -> tuple[Place, set[str]]:
        """Returns the place of a node, and the machines that a group which has to be made for it keeps away from."""
        own, bundles, others = layout.own_places(index), layout.free_bundles(index), layout.apart(index)
        # The roles of a machine that was given up move together, also to one that a role would avoid.
        for place in own:
            if layout.is_shared(place.group, name) and layout.machine(place) in {"", *nodes} - lost:
                return place, set()
        new = Place(f"{layout.first}/{index}/{name}")
        waits = min(bundles, key=lambda place: layout.obstacles(place, lost), default=new)
        for unwanted in (lost | avoided, lost):
            for place in (*own, *bundles):
                if layout.machine(place) in nodes.keys() - unwanted:
                    return place, set()
            apart = (others | unwanted) & nodes.keys()
            given_up = layout.machine(waits) in unwanted or layout.is_lost(waits)
            if given_up and self._has_room(bundle, nodes.keys() - apart):
                return new, apart
        return waits, (others | lost) & nodes.keys() if waits.group != layout.first else set()

    def _has_room(self, bundle: dict[str, float], machines: Iterable[str]) -> bool:
        room = self._tables.available()
        return any(self._tables.fits(bundle, room.get(machine, {})) for machine in machines)

    def _lost(self, layout: Layout, index: int, nodes: Mapping[str, Any]) -> set[str]:
        """Returns the machines that hold no new node, although Ray lists them."""
        mine = {layout.machine(place) for place in (*layout.own_places(index), *layout.free_bundles(index))}
        silent: set[str] = set()
        for machine in mine & nodes.keys():
            silent |= self._tables.without_raylet(machine, nodes)
        return silent | (self._tables.draining().keys() | self._unreachable()) & nodes.keys()

    def misplaced(self, prefix: str, waiting: set[str]) -> dict[str, str]:
        """Returns the actors that have not started and should elsewhere, with the reason: the other roles of their rank
        have moved, or they wait for a machine although their rank may use a place that has one."""
        found: dict[str, str] = {}
        nodes = self._tables.machines()
        there = nodes.keys() - self._unreachable()
        for layout in self._layouts(prefix):
            for name in waiting & layout.places.keys():
                place, rank = layout.places[name], _rank_of(name)
                for other in layout.own_places(rank):
                    if other != place and layout.machine(other) in there and layout.is_shared(other.group, name):
                        found[name] = "its machine was lost, and the other roles that share it have moved"
                if layout.machine(place) in there:
                    continue
                for other in layout.free_bundles(rank):
                    if other != place and layout.machine(other) in there - self._avoided(name, nodes):
                        found.setdefault(name, "no machine has room where it waits, and a bundle of the job has one")
                if self._overlooks_room(layout, name, there - self._avoided(name, nodes)):
                    found.setdefault(name, "Ray has no room for all that its placement group has lost, but for it")
        return found

    def _overlooks_room(self, layout: Layout, name: str, machines: set[str]) -> bool:
        """Returns whether a machine has had room for a while that Ray does not give to a node's lost bundle."""
        place = layout.places[name]
        apart = layout.apart(_rank_of(name))
        if not layout.is_lost(place) or not self._has_room(layout.bundle(place), machines - apart):
            self._room_since.pop(name, None)
            return False
        return time.monotonic() > self._room_since.setdefault(name, time.monotonic()) + _SETTLES

    def _avoided(self, name: str, nodes: Mapping[str, Any]) -> set[str]:
        since, hosts = self._avoids.get(name, (0.0, frozenset[str]()))
        if time.monotonic() > since + _INSISTS:
            return set()
        return {machine for machine, one in nodes.items() if one["NodeManagerHostname"] in hosts}

    def tidy(self, prefix: str) -> None:
        """Removes the ranks' own groups that no actor holds, and none will: Ray would reserve their bundles again."""
        if all(one["name"].count("/") < _PARTS for one in self._groups(prefix)):
            return
        there = self._tables.machines().keys() - self._unreachable()
        for layout in self._layouts(prefix):
            ranks = {_rank_of(name) for name in layout.places}
            for rank, group in list(layout.own_groups()):
                useless = rank in ranks or layout.machine(Place(group)) not in there
                if useless and not layout.is_held(group):
                    self._remove(group)

    def release(self, prefix: str, nodes: set[str]) -> bool:
        """Removes the groups that hold none of these nodes. Returns whether one is left."""
        kept = False
        for layout in self._layouts(prefix, nodes):
            for _, group in list(layout.own_groups()):
                if layout.is_held(group):
                    kept = True
                else:
                    self._remove(group)
            if layout.places:
                kept = True
            elif layout.state(layout.first):
                self._remove(layout.first)
        return kept

    def forget(self, mine: re.Pattern[str]) -> None:
        """Removes the keys of the nodes that match."""
        for key in internal_kv._internal_kv_list(_PLACED):
            if mine.fullmatch(key.decode()):
                internal_kv._internal_kv_del(key)
        for known in (self._avoids, self._room_since):
            for name in [name for name in known if mine.fullmatch(name)]:
                del known[name]

    def why_pending(self, prefix: str) -> str:
        """Returns why nodes of the groups have to wait, in Ray's words."""
        for one in self._groups(prefix):
            if one["state"] != "CREATED":
                why = one.get("stats", {}).get("scheduling_state", "")
                demands = self._tables.demands(one["bundles"].values())
                return f"its placement group is {one['state']}{f' ({why})' if why else ''}: it demands {demands}"
        return "its bundle is reserved, and Ray starts its actor once no earlier node uses it"

    def _layout(self, first: str) -> Layout:
        return Layout(first, self._groups(first), self._names(_may_hold(first)))

    def _layouts(self, prefix: str, living: set[str] | None = None) -> list[Layout]:
        """Returns the layout of each first group, of these actors or of all that Ray lists."""
        groups = self._groups(prefix)
        firsts: set[str] = {"/".join(one["name"].split("/")[:_PARTS]) for one in groups}
        listed = self._names(".*") if living is None and firsts else living or set()
        return [Layout(first, groups, listed) for first in firsts]

    def _groups(self, prefix: str) -> list[dict[str, Any]]:
        return [
            one
            for one in placement_group_table().values()
            if one["name"].startswith(prefix) and one["state"] != "REMOVED"
        ]

    def _make(self, name: str, bundle: dict[str, float], labels: dict[str, str], *, number: int = 1) -> Any:
        try:
            return ray.util.get_placement_group(name)
        except ValueError:
            selectors = {"bundle_label_selector": [labels] * number} if labels else {}
            bundles = [bundle] * number
            return ray.util.placement_group(
                bundles, strategy="STRICT_SPREAD", name=name, lifetime="detached", **selectors
            )

    def _remove(self, group: str) -> None:
        ray.util.remove_placement_group(ray.util.get_placement_group(group))


def _may_hold(group: str) -> str:
    """Returns the pattern of the actors that a first group and its ranks' own groups are for."""
    _, uid, _, job, roles = group.split("/")[:_PARTS]
    return names_of(job, roles.split("+"), uid)


def _node_of(name: str) -> str:
    """Returns the name of an actor without its incarnation."""
    return name.rpartition("-")[0]


def _rank_of(name: str) -> int:
    """Returns the rank of an actor, whose name ends with role, rank, and uid with incarnation."""
    return int(name.rsplit("-", 2)[1])
