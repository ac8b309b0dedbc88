"""Tests of what the Ray backend decides without Ray: bundles, events and settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.ray.backend import programs_of
from perdure.activities.nodes.ray.connection import RayConnection, RayUnavailable
from perdure.activities.nodes.ray.naming import names_of
from perdure.activities.nodes.ray.placement import actor_options, bundle_of, group_of
from perdure.activities.nodes.ray.settings import RaySettings, is_of_cluster
from perdure.activities.nodes.ray.task import NodeTask, task_of
from perdure.activities.nodes.ray.watch import GroupWatch, event_of
from perdure.base.credentials.grants import Grant
from perdure.base.credentials.keyring import SIGNING_KEYS, Keyring, read_signing_keys
from perdure.base.credentials.tickets import digest_of
from perdure.contract import LossCause, NodeCredentials, NodeEventKind, NodeRequest, WatchRequest
from perdure.contract.identity import Incarnation, NodeId
from perdure.contract.names import node_name
from perdure.spec.roles import Role
from perdure.spec.validate import parse_spec

UID = "abcd1234"
WORKER = {"nodes": 2, "command": ["torchrun", "train.py"]}


def role(**fields: Any) -> Role:
    return Role.model_validate(WORKER | fields)


def request(name: str = "worker", rank: int = 0, **roles: Any) -> NodeRequest:
    spec = parse_spec({"name": "walk", "backend": "ray", "roles": roles or {"worker": WORKER}})
    node = NodeCredentials(uid=UID, role=name, rank=rank, incarnation=1, token="t")
    return NodeRequest(
        node=node,
        name=node_name(spec.name, node),
        task_queue="q",
        spec=spec,
        job_id="job/default/walk",
        job_first_run_id="r",
        group_id="g",
    )


@pytest.mark.parametrize(
    ("fields", "bundle"),
    [
        ({}, {"CPU": 1.0}),
        ({"resources": {"cpu": "500m", "memory": "1.5Gi"}}, {"CPU": 0.5, "memory": 1610612736.0}),
        (
            {"resources": {"gpu": 8, "gpu_type": "H100"}, "ray": {"resources": {"rack_a": 1}}},
            {"GPU": 8.0, "accelerator_type:H100": 0.001, "rack_a": 1.0},
        ),
        ({"resources": {"gpu": 1}, "ray": {"resources": {"GPU": 0.5}}}, {"GPU": 0.5}),
    ],
)
def test_a_bundle_holds_what_one_node_needs(fields: dict[str, Any], bundle: dict[str, float]):
    assert bundle_of(role(**fields)) == bundle


def test_an_actor_takes_its_whole_bundle():
    options = actor_options(role(resources={"cpu": 4, "gpu": 2}, ray={"resources": {"rack_a": 1}}))
    assert options == {"num_cpus": 4.0, "num_gpus": 2.0, "memory": None, "resources": {"rack_a": 1.0}}


@pytest.mark.parametrize(
    ("runtime_env", "python", "programs"),
    [
        ({}, None, "/site/bin"),
        ({"working_dir": "s3://bucket/code.zip"}, None, "/site/bin"),
        ({"pip": ["tqdm"]}, None, ""),
        ({"pip": ["tqdm"]}, "/role/bin/python", "/role/bin"),
        ({}, "python3.12", ""),
    ],
)
def test_a_command_finds_the_programs_of_its_role_then_its_environment_then_its_site(
    runtime_env: dict[str, Any], python: str | None, programs: str
):
    worker = WORKER | ({"python": python} if python else {})
    spec = parse_spec(
        {"name": "walk", "backend": "ray", "roles": {"worker": worker}, "ray": {"runtime_env": runtime_env}}
    )
    assert programs_of(spec, "worker", node_python="/site/bin/python") == programs


def test_a_role_has_one_group_whose_least_nodes_are_reserved_together():
    group = group_of(request(worker=WORKER | {"nodes": "2:4", "ray": {"labels": {"zone": "a"}}}))
    assert group["name"] == f"perdure/{UID}/default/walk/worker"
    assert (group["gang"], group["bundle"], group["labels"]) == (2, {"CPU": 1.0}, {"zone": "a"})


def test_collocated_roles_share_bundles():
    trainer = {"nodes": 2, "command": ["x"], "resources": {"gpu": 1}, "collocate": ["rollout"]}
    rollout = {"nodes": 2, "command": ["y"], "resources": {"cpu": 3}}
    groups = [group_of(request(name, trainer=trainer, rollout=rollout)) for name in ("trainer", "rollout")]
    assert groups[0] == groups[1]
    assert groups[0]["bundle"] == {"CPU": 3.0, "GPU": 1.0}
    assert groups[0]["name"].endswith("/rollout+trainer")


def test_events_say_what_ray_knows():
    name, pattern = request().name, names_of("walk", ["worker"], UID)
    waiting = event_of(pattern, name, {"state": "pending", "reason": "its placement group is PENDING: it demands {}"})
    assert (waiting.kind, waiting.rank, waiting.incarnation, waiting.queued) == (NodeEventKind.PENDING, 0, 1, True)
    starting = event_of(pattern, name, {"state": "pending", "reason": "its bundle is reserved"})
    assert not starting.queued
    running = event_of(pattern, name, {"state": "running", "host": "m1", "reason": ""})
    assert (running.kind, running.host) == (NodeEventKind.RUNNING, "")
    gone = event_of(
        pattern, name, {"state": "gone", "host": "m1", "reason": "its machine was lost", "cause": "MACHINE"}
    )
    assert (gone.host, gone.cause, gone.reason) == ("m1", LossCause.MACHINE, "its machine was lost")


@pytest.mark.parametrize("job", ["walk", "my-eval", "my-eval-" + "long-" * 10 + "name"])
def test_nodes_of_a_role_whose_name_ends_that_of_another_one_are_told_apart(job: str):
    roles = ("worker", "eval-worker", "a-role-of-20-letters", "letters")
    names = {
        (role, rank): node_name(job, NodeId(uid=UID, role=role, rank=rank, incarnation=12))
        for role in roles
        for rank in (0, 1234)
    }
    for role in roles:
        pattern = names_of(job, [role], UID)
        assert {key for key, name in names.items() if re.fullmatch(pattern, name)} == {(role, 0), (role, 1234)}


async def test_a_watch_hears_of_its_own_role_only():
    running = {"state": "running", "host": "m", "node_id": "n"}
    ray = Played({f"walk-worker-0-{UID}1": running})
    batches = GroupWatch(ray, watched()).batches()
    await anext(batches)
    pattern = ray.calls[0][1]["pattern"]
    assert re.fullmatch(pattern, f"walk-worker-0-{UID}1")
    assert not re.fullmatch(pattern, f"walk-eval-worker-0-{UID}1")
    await batches.aclose()


def test_settings_name_the_cluster_and_what_agents_connect_to():
    own = {"TEMPORAL_ADDRESS": "127.0.0.1:7233"}
    with pytest.raises(ValueError, match="PERDURE_RAY_ADDRESS is not set"):
        RaySettings.from_environment({}, connection=own)
    variables = {
        "PERDURE_RAY_ADDRESS": "ray://head:10001",
        "PERDURE_RAY_TEMPORAL_ADDRESS": "temporal:7233",
        "TEMPORAL_NAMESPACE": "n",
        "OTHER": "x",
    }
    settings = RaySettings.from_environment(variables, connection=own)
    assert (settings.address, settings.namespace, settings.python) == ("ray://head:10001", "perdure", sys.executable)
    assert settings.connection == {"TEMPORAL_ADDRESS": "temporal:7233", "TEMPORAL_NAMESPACE": "n"}


@pytest.mark.parametrize(
    ("dashboard", "address", "same"),
    [
        ("http://head:8265", "ray://head:10001", True),
        ("http://localhost:8265", "127.0.0.1:6379", True),
        ("http://127.0.0.2:8265", "127.0.0.1:6379", False),
        ("http://head:8265", "auto", True),
        ("no URL", "127.0.0.1:6379", False),
    ],
)
def test_a_dashboard_is_of_the_cluster_with_its_host(dashboard: str, address: str, same: bool):
    assert is_of_cluster(dashboard, address) is same


def test_agents_on_the_cluster_get_a_grant_and_a_token_and_no_temporal(tmp_path: Path):
    for name, content in Keyring.new().to_entries().items():
        (tmp_path / name).write_text(content)
    variables = {
        "PERDURE_RAY_ADDRESS": "head:6379",
        "PERDURE_RAY_GATEWAY_ADDRESS": "gateway:7433",
        "PERDURE_RAY_GATEWAY_KEYRING": str(tmp_path),
        "TEMPORAL_API_KEY": "of-the-site",
    }
    settings = RaySettings.from_environment(variables, connection={"TEMPORAL_ADDRESS": "temporal:7233"})
    task = task_of(request(), connection=settings.connection, gateway=settings.gateway)
    assert task.environment == {}
    assert "of-the-site" not in task.model_dump_json()
    assert task.gateway is not None
    assert task.token is not None
    keys = read_signing_keys((tmp_path / SIGNING_KEYS).read_text())
    grant = Grant.verify(task.gateway.grant, keys)
    assert (grant.machine, grant.created, grant.incarnation) == (digest_of(task.token.get_secret_value()), True, 1)
    again = NodeTask.model_validate_json(task.model_dump_json())
    assert (again.token, again.gateway) == (task.token, task.gateway)


class Played(RayConnection):
    """A bridge that answers what a test lists."""

    def __init__(self, *answers: Any, leaves: Sequence[Exception] = ()) -> None:
        self.answers = list(answers)
        self.leaves = list(leaves)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def call(self, method: str, *, lasts: float = 0.0, **arguments: Any) -> Any:
        self.calls.append((method, arguments))
        if method == "leave" and self.leaves:
            raise self.leaves.pop(0)
        if method != "look":
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def watched(*known: tuple[int, int]) -> WatchRequest:
    return WatchRequest(
        group_id="g",
        job_id="job/default/walk",
        job_first_run_id="r",
        uid=UID,
        role="worker",
        group=0,
        backend="ray",
        namespace="default",
        owner_check=timedelta(seconds=30),
        known=tuple(Incarnation(rank=rank, incarnation=incarnation) for rank, incarnation in known),
    )


async def test_a_watch_reports_each_change_once_and_what_it_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perdure.activities.nodes.ray.watch._PAUSE", 0)
    running = {"state": "running", "host": "m", "node_id": "n"}
    first, second = f"walk-worker-0-{UID}1", f"walk-worker-1-{UID}1"
    ray = Played(
        {first: running},
        RayUnavailable("away"),
        {first: running},
        {first: running, second: {"state": "pending", "reason": "its placement group is PENDING: it demands {}"}},
        {second: running},
    )
    batches = GroupWatch(ray, watched((0, 1), (2, 1))).batches()
    seen = [[(event.rank, event.incarnation, str(event.kind)) for event in await anext(batches)] for _ in range(3)]
    assert seen == [
        [(0, 1, "RUNNING"), (2, 1, "GONE")],
        [(1, 1, "PENDING")],
        [(1, 1, "RUNNING"), (0, 1, "GONE")],
    ]
    await batches.aclose()


async def test_a_node_is_told_again_to_leave_where_ray_did_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perdure.activities.nodes.ray.watch._PAUSE", 0)
    drained = {"state": "running", "host": "m", "node_id": "n", "drained": "Ray drains its machine"}
    name = f"walk-worker-0-{UID}1"
    ray = Played({name: drained}, {name: drained}, leaves=[RayUnavailable("away")])
    batches = GroupWatch(ray, watched()).batches()
    assert [event.kind for event in await anext(batches)] == [NodeEventKind.RUNNING]
    assert [method for method, _ in ray.calls] == ["look", "leave", "look", "leave"]
    await batches.aclose()


async def test_a_node_leaves_a_machine_that_ray_drains_once():
    drained = {"state": "running", "host": "m", "node_id": "n", "drained": "Ray drains its machine"}
    name = f"walk-worker-0-{UID}1"
    ray = Played({name: drained}, {name: drained}, {})
    batches = GroupWatch(ray, watched()).batches()
    await anext(batches)
    assert [event.kind for event in await anext(batches)] == [NodeEventKind.GONE]
    assert [arguments for method, arguments in ray.calls if method == "leave"] == [
        {"name": name, "reason": "Ray drains its machine"}
    ]
    await batches.aclose()
