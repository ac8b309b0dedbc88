"""Tests of the launcher's configuration: errors name each wrong field, its value and what was expected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.protocol import world_of
from perdure.contract.worlds import Member, UnsoundSteps
from perdure.contract.worlds import World as DesiredWorld
from perdure_launcher.config import ConfigError, LauncherConfig, load_config, parse_config
from perdure_launcher.environment import base_environment, generation_environment
from perdure_training.node_api.bodies import World
from perdure_training.node_api.codec import decode, encode
from perdure_training.node_api.layout import PROGRESS, ROLES
from perdure_training.node_api.rank_environment import ADDRESS_VARIABLE, unsound_steps_of
from tests.support.waiting import DEADLINE

MINIMAL: dict[str, Any] = {"command": ["torchrun", "train.py"], "run_id": "0a1b2c3d"}


def test_a_minimal_configuration_has_the_documented_defaults(tmp_path: Path) -> None:
    config = parse_config(MINIMAL, run_directory=tmp_path)
    assert (config.nodes, config.processes, config.rendezvous, config.address) == ("1", None, "auto", "127.0.0.1")
    assert (config.stop_grace, config.termination_grace) == (timedelta(seconds=2), timedelta(seconds=30))


def test_fields_of_a_newer_backend_are_ignored(tmp_path: Path) -> None:
    config = parse_config({**MINIMAL, "nodes": "2:4", "processes": 8, "novelty": 1}, run_directory=tmp_path)
    assert (config.min_nodes, config.max_nodes, config.nodes, config.processes) == (2, 4, "2:4", 8)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"command": []}, 'command: expected a list of words such as ["torchrun", "train.py"], found []'),
        ({"command": "torchrun train.py"}, "command: expected a list of words"),
        ({"secrets": "HF_TOKEN"}, "secrets: expected a list of names of variables, found 'HF_TOKEN'"),
        ({"env": {"A": 1}}, "env: expected names with text values"),
        ({"nodes": "4:2"}, "nodes: expected a number such as 4, or min:max such as 2:4, found '4:2'"),
        ({"nodes": 0}, "nodes: expected a number"),
        ({"processes": 0}, 'processes: expected "gpu" or a number of at least 1, found 0'),
        ({"processes": True}, "processes: expected"),
        ({"rendezvous": "c10d"}, "rendezvous: expected one of auto, torchrun, env, found 'c10d'"),
        ({"run_id": "a/b"}, "run_id: expected letters, digits"),
        ({"stop_grace_s": -1}, "stop_grace_s: expected seconds, 0 or more, found -1"),
        ({"store_ports": 29500}, "store_ports: expected a range of ports such as 29500-29599, found 29500"),
        ({"store_ports": "29599-29500"}, "store_ports: expected a range of ports"),
        ({"store_ports": "65000-70000"}, "store_ports: expected a range of ports"),
        ({"log_max_bytes": 10}, "log_max_bytes: expected at least 4096 bytes, found 10"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({**MINIMAL, **fields}, run_directory=tmp_path)
    assert text in str(refused.value)


def test_a_run_directory_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a shorter folder"):
        parse_config(MINIMAL, run_directory=tmp_path / ("x" * 100))


def test_the_file_and_the_variables_are_named_when_they_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PERDURE_LAUNCHER_CONFIG is not set"):
        load_config({})
    with pytest.raises(ConfigError, match="PERDURE_RUN_DIR is not set"):
        load_config({"PERDURE_LAUNCHER_CONFIG": "x"})
    path = tmp_path / "c.json"
    environment = {"PERDURE_LAUNCHER_CONFIG": str(path), "PERDURE_RUN_DIR": "/tmp"}
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_config(environment)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object, found list"):
        load_config(environment)
    path.write_text(json.dumps(MINIMAL))
    assert load_config(environment).command == ("torchrun", "train.py")


def test_processes_of_a_role_with_a_port_know_where_others_reach_them() -> None:
    config = LauncherConfig(
        command=("python",), run_id="a", run_directory=Path(), env={}, role="reward", port=6000, address="fd00::2"
    )
    known = base_environment(config, Path("/injected"), {})
    assert (known["PERDURE_PORT"], known[ADDRESS_VARIABLE]) == ("6000", "fd00::2")


@pytest.mark.parametrize("nodes", [3, 3000])
def test_a_rank_starts_however_many_nodes_its_job_has(nodes: int, tmp_path: Path) -> None:
    addresses = [f"trainer-{rank}.perdure-a-job-0a1b2c3d.nlp.svc" for rank in range(nodes)]
    (tmp_path / ROLES).write_text(json.dumps({"trainer": {"addresses": addresses, "ready": True}}))
    world = World(
        generation=1,
        nodes=1,
        group_rank=0,
        base_rank=0,
        world_size=1,
        store_address="::1",
        store_port=1,
        store_host=True,
    )
    variables = generation_environment(world, progress=tmp_path / PROGRESS, run_id="a", parent=1)
    assert ("PERDURE_ROLES" in variables) == (nodes == 3)
    script = "from perdure_training import roles; print(len(roles.addresses('trainer')))"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ended.stdout == f"{nodes}\n", ended.stderr


def test_ranks_learn_of_every_state_that_the_job_went_back_from(tmp_path: Path) -> None:
    earlier = UnsoundSteps(generation=1, after=55, found_at=57)
    member = Member(incarnation=1, group_rank=0, base_rank=0, processes=1)
    world = DesiredWorld(
        generation=3,
        members={0: member},
        nodes=1,
        processes=1,
        store_address="::1",
        store_port=1,
        store_rank=0,
        unsound=UnsoundSteps(generation=2, after=65, found_at=-1, earlier=(earlier,)),
    )
    # As the agent gives it to the launcher.
    entered = decode(World, json.loads(encode(world_of(world, 0, member))))
    unsound = unsound_steps_of(generation_environment(entered, progress=tmp_path / PROGRESS, run_id="a", parent=1))
    assert unsound is not None
    loaded = {(1, 55): True, (1, 56): False, (2, 60): True, (2, 66): False, (3, 66): True}
    assert {of: not unsound.has(generation=of[0], step=of[1]) for of in loaded} == loaded
