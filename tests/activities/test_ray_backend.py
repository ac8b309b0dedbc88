"""Tests of what the Ray backend decides without Ray: bundles, events, settings, and a bridge that hangs, differs or
dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.activities.nodes.ray import connection
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
from tests.support.waiting import eventually

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


async def test_the_bridge_gets_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEMPORAL_API_KEY", "secret")
    monkeypatch.setenv("PERDURE_RAY_GATEWAY_KEYRING", "/keys")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("RAY_TLS_CA_CERT", "/ca")
    answers = (said(id=0, result=""), "read call", said(id=1, result=[]), "read end")
    played = bridge(tmp_path, f"env > {tmp_path}/seen", *answers)
    assert await played.call("names") == []
    seen = (tmp_path / "seen").read_text()
    assert "TEMPORAL_" not in seen
    assert "PERDURE_" not in seen
    assert "AWS_" not in seen
    # Ray's own it needs.
    assert "RAY_TLS_CA_CERT=/ca" in seen
    await played.close()


def test_the_bridge_runs_as_a_user_that_exists_and_that_the_worker_may_become(monkeypatch: pytest.MonkeyPatch):
    def settings(user: str) -> RaySettings:
        variables = {"PERDURE_RAY_ADDRESS": "head:6379", "PERDURE_RAY_USER": user}
        return RaySettings.from_environment(variables, connection={})

    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert settings("").user == ""
    assert settings("nobody").user == "nobody"
    with pytest.raises(ValueError, match="PERDURE_RAY_USER is 'no-one', and this machine has no such user; create it"):
        settings("no-one")
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    with pytest.raises(ValueError, match="only a worker of root starts a process of another user; unset it"):
        settings("nobody")


def bridge(folder: Path, *lines: str, user: str = "") -> RayConnection:
    """A connection to a bridge that is played by lines of a shell's script."""
    python = folder / "python"
    python.write_text("\n".join(("#!/bin/sh", *lines, "")))
    python.chmod(0o755)
    return RayConnection(address="head:6379", namespace="perdure", python=str(python), user=user)


def said(**answer: Any) -> str:
    return f"echo '{json.dumps(answer)}'"


async def test_a_cluster_of_another_version_is_refused_with_both(tmp_path: Path):
    words = "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1\nThis: Ray: 2.60.0"
    played = bridge(tmp_path, said(id=0, kind="RuntimeError", error=words).replace("\\n", "\\\\n"), "exit 1")
    with pytest.raises(NodeRefused, match=r"Ray: 2\.9\.0 Python: 3\.9\.1 This: Ray: 2\.60\.0; set PERDURE_RAY_PYTHON"):
        await played.call("names")


async def test_a_connection_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_CONNECTS", 0.3)
    played = bridge(tmp_path, "exec sleep 60")
    with pytest.raises(RayUnavailable, match="head:6379 did not answer"):
        await played.call("names")
    await played.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of another user")
async def test_a_bridge_of_another_user_reads_nothing_of_the_worker_and_cannot_end_it():
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        folder, tried = Path(home), Path(home) / "tried"
        folder.chmod(0o755)
        tried.mkdir()
        shutil.chown(tried, "nobody")
        (folder / "keys").write_text("of the gateway")
        (folder / "keys").chmod(0o600)
        attempts = {"keys": f"cat {folder}/keys", "variables": "cat /proc/$PPID/environ", "end": "kill -0 $PPID"}
        lines = [f"{attempt} > /dev/null 2>&1; echo $? > {tried}/{name}" for name, attempt in attempts.items()]
        answers = (said(id=0, result=""), "read call", said(id=1, result=[]), "read end")
        played = bridge(folder, f"id -u > {tried}/user", *lines, *answers, user="nobody")
        assert await played.call("names") == []
        assert (tried / "user").read_text().strip() == str(pwd.getpwnam("nobody").pw_uid)
        assert [name for name in attempts if (tried / name).read_text().strip() == "0"] == []
        await played.close()


async def test_a_connection_whose_call_is_cancelled_is_ended(tmp_path: Path):
    played = bridge(tmp_path, f"echo $$ > {tmp_path}/pid", "exec sleep 60")
    call = asyncio.create_task(played.call("names"))
    pid = await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), what="its process")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: not psutil.pid_exists(int(pid)), what="its end")


HANGS = """
import pathlib, sys, time
from unittest.mock import MagicMock
parts = (
    "_private.client_mode_hook cloudpickle core.generated.common_pb2 exceptions experimental util.placement_group "
    "util.scheduling_strategies"
)
sys.modules |= {f"ray.{part}": MagicMock() for part in parts.split()}
def init(**_):
    pathlib.Path(PATH).touch()
    time.sleep(60)
"""
"""A Ray whose cluster never answers."""


async def test_a_bridge_that_connects_ends_with_its_worker(tmp_path: Path):
    connects = tmp_path / "connects"
    (tmp_path / "ray.py").write_text(HANGS.replace("PATH", repr(str(connects))))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(connection.__file__).with_name("bridge.py")), "head:6379", "perdure"),
        # A worker that has ended, however it did, has closed it.
        stdin=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    try:
        await eventually(connects.exists, what="its connecting")
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(10):
            await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_calls_that_wait_for_one_connection_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_CONNECTS", 0.5)
    played = bridge(tmp_path, f"echo $$ >> {tmp_path}/pids", "exec sleep 60")
    found = await asyncio.gather(*(played.call("names") for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in found] == [RayUnavailable] * 5
    assert len((tmp_path / "pids").read_text().split()) == 1
    await played.close()


async def test_a_connection_closes_though_code_in_its_process_keeps_the_pipes_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "_CLOSES", 0.5)
    kept = f"setsid sh -c 'echo $$ > {tmp_path}/kept; exec sleep 60' &"
    played = bridge(tmp_path, kept, said(id=0, result=""), "read call", said(id=1, result=[]), "read end")
    assert await played.call("names") == []
    pid = await eventually(lambda: (tmp_path / "kept").exists() and (tmp_path / "kept").read_text(), what="it")
    try:
        began = time.monotonic()
        await played.close()
        assert time.monotonic() - began < 10
    finally:
        os.kill(int(pid), 9)


async def test_what_code_in_the_process_has_started_ends_with_it(tmp_path: Path):
    lines = (f"sleep 60 & echo $! > {tmp_path}/started", said(id=0, result=""), "read call", said(id=1, result=[]))
    played = bridge(tmp_path, *lines, "read end")
    assert await played.call("names") == []
    pid = int((tmp_path / "started").read_text())
    await played.close()
    await eventually(lambda: not _runs(pid), what="its end")


def _runs(pid: int) -> bool:
    """Whether a process has not ended; who has taken it over may not have asked for its exit code."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_a_call_that_hangs_is_ended_and_the_next_one_connects_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "_CALL", 0.3)
    played = bridge(tmp_path, f"echo $$ >> {tmp_path}/pids", said(id=0, result="2.60.0"), "exec sleep 60")
    for _ in range(2):
        with pytest.raises(RayUnavailable, match="did not answer"):
            await played.call("names")
    assert len((tmp_path / "pids").read_text().split()) == 2
    await played.close()


@pytest.mark.parametrize("written", ["no JSON", "[1]", '{"result": 1}', "3"])
async def test_a_bridge_that_writes_no_answer_is_ended_and_the_next_call_connects_again(tmp_path: Path, written: str):
    lines = (f"echo $$ >> {tmp_path}/pids", said(id=0, result="2.60.0"), "read call", f"echo '{written}'")
    played = bridge(tmp_path, *lines, "echo forged >&2", "exec sleep 60")
    for _ in range(2):
        with pytest.raises(RayUnavailable, match="the connection has ended"):
            await played.call("names")
    assert len((tmp_path / "pids").read_text().split()) == 2
    await played.close()


async def test_an_interpreter_without_ray_or_that_does_not_exist_is_refused_with_the_variable(tmp_path: Path):
    played = bridge(tmp_path, "echo \"ModuleNotFoundError: No module named 'ray'\" >&2", "exit 1")
    with pytest.raises(NodeRefused, match=r"python has no Ray; install Ray .* or set PERDURE_RAY_PYTHON"):
        await played.call("names")
    missing = RayConnection(address="head:6379", namespace="perdure", python=str(tmp_path / "missing"))
    with pytest.raises(NodeRefused, match=r"No such file or directory: .*missing'; set PERDURE_RAY_PYTHON"):
        await missing.call("names")


async def test_a_bridge_that_dies_says_its_last_words(tmp_path: Path):
    played = bridge(tmp_path, said(id=0, result="2.60.0"), "read call", "echo lost the cluster >&2")
    with pytest.raises(RayUnavailable, match="the connection has ended: lost the cluster"):
        await played.call("names")


@pytest.mark.parametrize(
    ("kind", "error", "remedy"),
    [
        ("ForeignActor", NodeRefused, "give the job another name"),
        ("WrongEnvironment", NodeRefused, "Ray takes no such ray.runtime_env: no room"),
        ("NotYet", NodeNotYet, "no room"),
    ],
)
async def test_a_refusal_of_the_bridge_is_one_of_the_backend(
    tmp_path: Path, kind: str, error: type[Exception], remedy: str
):
    played = bridge(tmp_path, said(id=0, result=""), "read call", said(id=1, kind=kind, error="no room"), "read end")
    with pytest.raises(error, match=remedy):
        await played.call("create")
    await played.close()


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
