"""Tests of where nodes are placed when a machine dies before Ray notices: Ray's own tables are played, as no test can
hold Ray at such a moment."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.activities.nodes.ray.placement import group_of
from tests.activities.played_ray import PlayedRay, playing
from tests.activities.test_ray_backend import UID, request

TRAINER = {"nodes": 2, "command": ["x"], "resources": {"gpu": 1}, "collocate": ["rollout"]}
ROLLOUT = {"nodes": 2, "command": ["y"], "resources": {"cpu": 3}}
ROLES = {"trainer": TRAINER, "rollout": ROLLOUT}


FIRST = f"perdure/{UID}/default/walk/rollout+trainer"
"""The first group of both roles."""


@pytest.fixture
def played() -> Iterator[tuple[PlayedRay, Any]]:
    with playing("m1", "m2", "m3", "m4", "m5") as both:
        yield both


@pytest.fixture
def ray(played: tuple[PlayedRay, Any]) -> PlayedRay:
    return played[0]


def name_of(role: str, rank: int, incarnation: int) -> str:
    return f"walk-{role}-{rank}-{UID}{incarnation}"


class Placer:
    """Creates nodes by the bridge, and tells where they are."""

    def __init__(self, ray: PlayedRay, bridge: Any) -> None:
        self.ray = ray
        self.bridge = bridge

    def create(self, role: str, rank: int, incarnation: int = 1, avoid: Sequence[str] = (), **roles: Any) -> str:
        """Returns the machine; empty if none is given yet."""
        name = name_of(role, rank, incarnation)
        group = group_of(request(role, rank, **(roles or ROLES)))
        self.bridge.create(name=name, options={}, group=group, index=rank, avoid=list(avoid), archive="")
        return self.ray.actors[name].machine

    def lose(self, machine: str, *unreachable: str) -> None:
        """A machine has died; Ray lists it as alive, and some of its actors could not be reached."""
        for name in unreachable:
            one = self.bridge._tracked[name]
            one.facts, one.unreachable_at = {"state": "gone", "node_id": machine}, sys.float_info.max

    def look(self, role: str) -> dict[str, Any]:
        """Returns what the bridge knows of a role's nodes."""
        return self.bridge.look(pattern=f"walk-{role}-.*", prefix=f"perdure/{UID}/", timeout=0)

    def release(self) -> None:
        self.bridge.release(prefix=f"perdure/{UID}/", over=False)


@pytest.fixture
def placer(played: tuple[PlayedRay, Any]) -> Placer:
    return Placer(*played)


def test_the_roles_of_a_lost_machine_move_together(placer: Placer):
    before = [placer.create(role, rank) for rank in (0, 1) for role in ("trainer", "rollout")]
    assert before == ["m1", "m1", "m2", "m2"]
    placer.lose("m1", name_of("trainer", 0, 1))
    assert (placer.create("trainer", 0, 2), placer.create("rollout", 0, 2)) == ("m3", "m3")


def test_a_role_follows_one_that_has_moved_before_ray_moves_the_first_group(ray: PlayedRay, placer: Placer):
    for role in ("trainer", "rollout"):
        placer.create(role, 0)
    placer.lose("m1", name_of("trainer", 0, 1))
    moved = placer.create("trainer", 0, 2)
    # Ray notices, and places the bundle again.
    ray.machines.remove("m1")
    ray.groups[group_of(request("trainer", 0, **ROLES))["name"]]["bundles_to_node_id"]["0"] = "m4"
    assert placer.create("rollout", 0, 2) == moved


def test_roles_that_have_moved_are_moved_again_with_their_second_machine(placer: Placer):
    for incarnation, machine in ((1, "m1"), (2, "m3"), (3, "m4")):
        places = [placer.create(role, 0, incarnation) for role in ("trainer", "rollout")]
        assert places == [machine, machine]
        placer.lose(machine, name_of("rollout", 0, incarnation))


def test_a_group_stays_for_as_long_as_one_role_of_its_machine_uses_it(ray: PlayedRay, placer: Placer):
    for role in ("trainer", "rollout"):
        placer.create(role, 0)
    placer.lose("m1", name_of("trainer", 0, 1))
    for role in ("trainer", "rollout"):
        placer.create(role, 0, 2)
        del ray.actors[name_of(role, 0, 1)]
    # The trainer, whose name the group has, has ended.
    del ray.actors[name_of("trainer", 0, 2)]
    placer.release()
    assert len(ray.groups) == 2
    assert placer.create("trainer", 0, 3) == "m3"
    for name in list(ray.actors):
        del ray.actors[name]
    placer.release()
    assert not ray.groups


def test_a_node_with_a_machine_of_its_own_stays_where_it_has_moved(placer: Placer):
    worker = {"nodes": 2, "command": ["x"]}
    assert [placer.create("worker", rank, worker=worker) for rank in (0, 1)] == ["m1", "m2"]
    placer.lose("m2", name_of("worker", 1, 1))
    assert [placer.create("worker", 1, incarnation, worker=worker) for incarnation in (2, 3)] == ["m3", "m3"]


def test_a_node_avoids_a_machine_whose_raylet_is_gone_before_any_actor_was_called(ray: PlayedRay, placer: Placer):
    for role in ("trainer", "rollout"):
        placer.create(role, 0)
    ray.without_raylet.add("m1")
    assert (placer.create("rollout", 0, 2), placer.create("trainer", 0, 2)) == ("m3", "m3")


def test_a_node_is_lost_with_the_raylet_of_its_machine_before_ray_tells(ray: PlayedRay, placer: Placer):
    placer.create("rollout", 0)
    name = name_of("rollout", 0, 1)
    placer.bridge._tracked[name].facts = {"state": "running", "host": "m1", "node_id": "m1"}
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        ray.ports["m1"] = raylet.getsockname()[1]
        assert placer.look("rollout")[name]["state"] == "running"
        first, _ = raylet.accept()
        first.close()
        assert placer.look("rollout")[name]["state"] == "running", "a raylet may end a connection that says nothing"
        second, _ = raylet.accept()
    second.close()
    lost = placer.look("rollout")[name]
    assert (lost["state"], lost["cause"], lost["host"]) == ("gone", "MACHINE", "m1")
    assert placer.create("rollout", 0, 2) == "m3", "its machine is avoided while Ray lists it"


def test_a_raylet_that_was_never_reached_says_nothing(ray: PlayedRay, placer: Placer):
    placer.create("rollout", 0)
    name = name_of("rollout", 0, 1)
    placer.bridge._tracked[name].facts = {"state": "running", "host": "m1", "node_id": "m1"}
    ray.without_raylet.update(ray.machines)
    assert placer.look("rollout")[name]["state"] == "running"


def test_machines_that_do_not_answer_are_not_tried_one_after_the_other(
    ray: PlayedRay, placer: Placer, monkeypatch: pytest.MonkeyPatch
):
    for rank in (0, 1):
        placer.create("rollout", rank)
        known = placer.bridge._tracked[name_of("rollout", rank, 1)]
        known.facts = {"state": "running", "host": f"m{rank + 1}", "node_id": f"m{rank + 1}"}
    tried: list[str] = []

    def times_out(address: tuple[str, int], _: float) -> socket.socket:
        tried.append(address[0])
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", times_out)
    for _ in range(3):
        assert {one["state"] for one in placer.look("rollout").values()} == {"running"}
    assert len(tried) == 2, "one machine, and once more to tell silence from a refusal"


def test_a_role_that_waits_for_the_lost_machine_is_reported_as_gone_once_the_other_has_moved(
    ray: PlayedRay, placer: Placer
):
    for role in ("trainer", "rollout"):
        placer.create(role, 0)
    # It was requested again before anything told that its machine is lost.
    placer.create("rollout", 0, 2)
    waits = placer.look("rollout")[name_of("rollout", 0, 2)]
    assert waits["state"] == "pending"
    placer.lose("m1", name_of("trainer", 0, 1))
    assert placer.create("trainer", 0, 2) == "m3"
    del ray.actors[name_of("trainer", 0, 1)]
    lost = placer.look("rollout")[name_of("rollout", 0, 2)]
    assert (lost["state"], lost["cause"]) == ("gone", "MACHINE")
    assert placer.create("rollout", 0, 3) == "m3"
    assert placer.look("rollout")[name_of("rollout", 0, 3)]["state"] == "pending"


def test_a_bundle_that_ray_reserves_again_for_roles_that_have_moved_is_used_by_others_that_lose_their_machine(
    ray: PlayedRay, placer: Placer
):
    ray.machines = ["m1", "m2", "m3"]
    first = group_of(request("trainer", 0, **ROLES))["name"]
    for rank in (0, 1):
        for role in ("trainer", "rollout"):
            placer.create(role, rank)
    placer.lose("m1", name_of("trainer", 0, 1))
    assert [placer.create(role, 0, 2) for role in ("trainer", "rollout")] == ["m3", "m3"]
    for role in ("trainer", "rollout"):
        del ray.actors[name_of(role, 0, 1)]
    # The machine is back, and Ray reserves it for the roles that have moved. Then the other machine is lost.
    ray.machines = ["m2", "m3", "m4"]
    ray.groups[first]["bundles_to_node_id"]["0"] = "m4"
    ray.without_raylet.add("m2")
    assert [placer.create(role, 1, 2) for role in ("rollout", "trainer")] == ["m4", "m4"]
    for role in ("trainer", "rollout"):
        del ray.actors[name_of(role, 1, 1)]
    # The bundle of rank 0 is taken: when it loses its machine, it waits or uses that of rank 1.
    ray.machines = ["m3", "m4", "m5"]
    ray.groups[first]["bundles_to_node_id"]["1"] = "m5"
    placer.lose("m3", name_of("trainer", 0, 2))
    assert [placer.create(role, 0, 3) for role in ("trainer", "rollout")] == ["m5", "m5"]


def test_a_node_without_room_waits_in_the_first_group_and_demands_nothing_twice(ray: PlayedRay, placer: Placer):
    ray.machines = ["m1", "m2"]
    for role in ("trainer", "rollout"):
        for rank in (0, 1):
            placer.create(role, rank)
    ray.without_raylet.add("m2")
    placer.create("trainer", 1, 2)
    assert list(ray.groups) == [FIRST]


def test_a_node_that_waits_for_room_starts_where_ray_reserves_its_bundle_first(ray: PlayedRay, placer: Placer):
    ray.machines = ["m1", "m2", "m3"]
    for rank in (0, 1):
        for role in ("trainer", "rollout"):
            placer.create(role, rank)
    placer.lose("m1", name_of("trainer", 0, 1))
    # Another job takes the room in which the group is being made.
    for role in ("trainer", "rollout"):
        placer.create(role, 0, 2)
        del ray.actors[name_of(role, 0, 1)]
    own = f"{FIRST}/0/{name_of('trainer', 0, 2)}"
    ray.groups[own] |= {"state": "PENDING", "bundles_to_node_id": {"0": ""}}
    assert placer.look("trainer")[name_of("trainer", 0, 2)]["state"] == "pending"
    # A machine is added, and Ray reserves it for the bundle that it has lost.
    ray.machines = ["m2", "m3", "m4"]
    ray.groups[FIRST]["bundles_to_node_id"]["0"] = "m4"
    for role in ("trainer", "rollout"):
        waits = placer.look(role)[name_of(role, 0, 2)]
        assert (waits["state"], waits["cause"]) == ("gone", "MACHINE")
        del ray.actors[name_of(role, 0, 2)]
    assert [placer.create(role, 0, 3) for role in ("rollout", "trainer")] == ["m4", "m4"]
    assert list(ray.groups) == [FIRST]


def test_a_node_that_waits_uses_the_bundle_of_a_rank_that_has_moved(ray: PlayedRay, placer: Placer):
    worker = {"nodes": 2, "command": ["x"]}
    first = group_of(request("worker", 0, worker=worker))["name"]
    ray.machines = ["m1", "m2", "m3"]
    assert [placer.create("worker", rank, worker=worker) for rank in (0, 1)] == ["m1", "m2"]
    placer.lose("m1", name_of("worker", 0, 1))
    assert placer.create("worker", 0, 2, worker=worker) == "m3"
    for rank in (0, 1):
        del ray.actors[name_of("worker", rank, 1)]
    # Both machines are lost in Ray's tables, too, and one is given to the bundle of the rank that has moved.
    ray.machines = ["m3"]
    ray.groups[first]["bundles_to_node_id"] = {"0": "", "1": ""}
    assert placer.create("worker", 1, 2, worker=worker) == ""
    assert placer.look("worker")[name_of("worker", 1, 2)]["state"] == "pending"
    ray.machines.append("m4")
    ray.groups[first]["bundles_to_node_id"]["0"] = "m4"
    assert placer.look("worker")[name_of("worker", 1, 2)]["state"] == "gone"
    del ray.actors[name_of("worker", 1, 2)]
    assert placer.create("worker", 1, 3, worker=worker) == "m4"


def test_a_node_starts_where_there_is_room_for_it_and_not_for_all_that_its_group_has_lost(
    ray: PlayedRay, placer: Placer
):
    ray.schedules, ray.machines = True, ["m1", "m2", "m3"]
    for role in ("trainer", "rollout"):
        for rank in (0, 1):
            placer.create(role, rank)
    placer.lose("m2", name_of("trainer", 1, 1))
    for role in ("trainer", "rollout"):
        assert placer.create(role, 1, 2) == "m3"
        del ray.actors[name_of(role, 1, 1)]
    # Ray learns of both machines at once, and looks for two in their place.
    ray.machines = ["m3"]
    ray.schedule()
    for role in ("trainer", "rollout"):
        del ray.actors[name_of(role, 0, 1)]
    assert placer.create("trainer", 0, 2) == ""
    assert placer.look("trainer")[name_of("trainer", 0, 2)]["state"] == "pending"
    ray.machines.append("m4")
    ray.schedule()
    assert ray.groups[FIRST]["bundles_to_node_id"] == {"0": "", "1": ""}
    for _ in range(2):
        waits = placer.look("trainer")[name_of("trainer", 0, 2)]
    assert (waits["state"], waits["reason"]) == (
        "gone",
        "Ray has no room for all that its placement group has lost, but for it",
    )
    del ray.actors[name_of("trainer", 0, 2)]
    assert [placer.create(role, 0, 3) for role in ("rollout", "trainer")] == ["m4", "m4"]


def test_the_group_that_a_rank_has_left_for_another_machine_ends(ray: PlayedRay, placer: Placer):
    worker = {"nodes": 2, "command": ["x"]}
    for rank in (0, 1):
        placer.create("worker", rank, worker=worker)
    placer.lose("m1", name_of("worker", 0, 1))
    assert placer.create("worker", 0, 2, worker=worker) == "m3"
    placer.lose("m3", name_of("worker", 0, 2))
    assert placer.create("worker", 0, 3, worker=worker) == "m4"
    assert len(ray.groups) == 3, "until its actor is listed no more"
    del ray.actors[name_of("worker", 0, 2)]
    placer.bridge.tidy(prefix=f"perdure/{UID}/")
    assert {name.rpartition("/")[2] for name in ray.groups} == {"worker", name_of("worker", 0, 3)}


def test_a_further_node_moves_from_a_machine_that_is_lost_or_to_be_avoided(ray: PlayedRay, placer: Placer):
    worker = {"nodes": "1:3", "command": ["x"]}
    assert [placer.create("worker", rank, worker=worker) for rank in (0, 1)] == ["m1", "m2"]
    ray.without_raylet.add("m2")
    assert placer.create("worker", 1, 2, worker=worker) == "m3"
    del ray.actors[name_of("worker", 1, 1)]
    assert placer.create("worker", 1, 3, avoid=["m3"], worker=worker) == "m4"
    for incarnation in (2, 3):
        ray.actors.pop(name_of("worker", 1, incarnation))
    placer.bridge.tidy(prefix=f"perdure/{UID}/")
    assert placer.create("worker", 1, 4, worker=worker) in ("m3", "m4"), "its machine is kept for it"
    assert len(ray.groups) == 2


def test_an_avoided_machine_is_used_where_no_other_has_room(ray: PlayedRay, placer: Placer):
    ray.machines = ["m1", "m2"]
    for rank in (0, 1):
        placer.create("trainer", rank)
    del ray.actors[name_of("trainer", 0, 1)]
    assert placer.create("trainer", 0, 2, avoid=["m1"]) == "m1"
    assert list(ray.groups) == [FIRST]


def test_a_node_insists_for_a_while_on_another_machine_than_the_one_that_it_avoids(
    ray: PlayedRay, placer: Placer, monkeypatch: pytest.MonkeyPatch
):
    for role in ("trainer", "rollout"):
        placer.create(role, 0)
        del ray.actors[name_of(role, 0, 1)]
    assert placer.create("trainer", 0, 2, avoid=["m1"]) == "m3"
    own = f"{FIRST}/0/{name_of('trainer', 0, 2)}"
    ray.groups[own] |= {"state": "PENDING", "bundles_to_node_id": {"0": ""}}
    assert placer.look("trainer")[name_of("trainer", 0, 2)]["state"] == "pending"
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert placer.look("trainer")[name_of("trainer", 0, 2)]["state"] == "gone"


def test_a_role_follows_the_other_onto_a_machine_that_it_should_avoid(placer: Placer):
    for role in ("trainer", "rollout"):
        placer.create(role, 0)
    placer.lose("m1", name_of("trainer", 0, 1))
    moved = placer.create("trainer", 0, 2, avoid=["m1"])
    assert placer.create("rollout", 0, 2, avoid=["m1", moved]) == moved


def test_a_lost_machine_gets_no_node_where_all_others_should_be_avoided(ray: PlayedRay, placer: Placer):
    worker = {"nodes": 1, "command": ["x"]}
    assert placer.create("worker", 0, worker=worker) == "m1"
    ray.without_raylet.add("m1")
    assert placer.create("worker", 0, 2, avoid=ray.machines, worker=worker) == "m2"


def test_nodes_wait_in_the_first_group_until_ray_has_room_for_it(ray: PlayedRay, placer: Placer):
    ray.machines = ["m1"]
    worker = {"nodes": 2, "command": ["x"]}
    assert [placer.create("worker", rank, worker=worker) for rank in (0, 1)] == ["m1", ""]
    assert len(ray.groups) == 1


def test_an_actor_of_another_owner_with_the_name_of_a_node_keeps_no_group(ray: PlayedRay, placer: Placer):
    placer.create("trainer", 0)
    del ray.actors[name_of("trainer", 0, 1)]
    # It has a part of a node's methods.
    ray.actors[name_of("trainer", 0, 2)] = SimpleNamespace(describe_node=None)
    placer.release()
    assert not ray.groups
    with pytest.raises(Exception, match="that is no node exists"):
        placer.create("trainer", 0, 2)


def test_machines_that_the_worker_does_not_reach_are_not_taken_for_lost(ray: PlayedRay, placer: Placer):
    worker = {"nodes": 2, "command": ["x"]}
    ray.without_raylet |= set(ray.machines)
    assert [placer.create("worker", rank, worker=worker) for rank in (0, 1)] == ["m1", "m2"]


class PlayedJob:
    """A job of two roles that share machines, on a cluster that schedules as Ray does: it reserves the bundles of
    machines that it knows to be lost before those of new groups."""

    def __init__(self, ray: PlayedRay, placer: Placer, *, gang: int, ranks: int) -> None:
        self.ray, self.placer, self.ranks = ray, placer, range(ranks)
        spec: dict[str, Any] = {"nodes": f"{gang}:{ranks}"}
        self.roles = {"trainer": TRAINER | spec, "rollout": ROLLOUT | spec}
        self.incarnations = {(role, rank): 0 for role in self.roles for rank in self.ranks}
        ray.schedules = True

    def create(self) -> None:
        """Creates what the job lacks, as far as the first nodes allow it."""
        for (role, rank), incarnation in self.incarnations.items():
            if name_of(role, rank, incarnation) not in self.ray.actors:
                with suppress(Exception):
                    self.placer.create(role, rank, incarnation + 1, (), **self.roles)
                    self.incarnations[role, rank] += 1
                self.ray.schedule()

    def look(self) -> None:
        """Takes in which nodes wait in vain, and ends these."""
        for role in self.roles:
            for name, facts in self.placer.look(role).items():
                if facts["state"] == "gone":
                    self.ray.actors.pop(name, None)

    def lose(self, machine: str) -> None:
        """A machine dies with its actors, which the job's agents tell before Ray does."""
        self.ray.without_raylet.add(machine)
        for name, place in self.places().items():
            if place == machine:
                del self.ray.actors[name]
        self.placer.bridge.tidy(prefix=f"perdure/{UID}/")

    def notice(self) -> None:
        """Ray learns of the machines that are lost."""
        self.ray.machines = [one for one in self.ray.machines if one not in self.ray.without_raylet]
        self.ray.schedule()

    def places(self) -> dict[str, str]:
        """The machine of each node; empty while it waits."""
        return {name: self.ray.machine_of(*actor.place) for name, actor in self.ray.actors.items()}


@given(st.integers(0, 2**32))
def test_every_node_gets_a_machine_once_there_are_enough(seed: int):
    random = Random(seed)
    gang, further = random.randint(1, 3), random.randint(0, 1)
    with playing(*(f"m{number}" for number in range(gang + further))) as (ray, bridge):
        job = PlayedJob(ray, Placer(ray, bridge), gang=gang, ranks=gang + further)
        job.create()
        for number in range(15):
            step = random.choice(("lose", "notice", "add", "create", "look"))
            match step:
                case "lose" if alive := sorted(set(ray.machines) - ray.without_raylet):
                    job.lose(random.choice(alive))
                case "add":
                    ray.machines.append(f"n{number}")
                    ray.schedule()
                case "notice":
                    job.notice()
                case "create":
                    job.create()
                case _:
                    job.look()
        # Room for all, and not for one more.
        for machine in sorted(set(ray.machines) - ray.without_raylet)[gang + further :]:
            job.lose(machine)
        job.notice()
        ray.machines += [f"o{number}" for number in range(gang + further - len(ray.machines))]
        for _ in range(10):
            ray.schedule()
            job.create()
            job.look()
        places = job.places()
        for rank in job.ranks:
            trainer, rollout = (places[name_of(role, rank, job.incarnations[role, rank])] for role in job.roles)
            assert trainer == rollout != ""
        assert len(set(places.values())) == gang + further
        assert len(places) == 2 * (gang + further)
