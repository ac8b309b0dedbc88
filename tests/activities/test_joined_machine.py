"""Tests of the identity of a joining machine in its allocation, and of its address."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from perdure.activities.nodes.joined.machine import (
    InvalidAddress,
    address_towards,
    joined_nodes,
    own_address,
    this_machine,
)
from perdure.activities.nodes.local.folders import NodeFolders

SERVER = "127.0.0.1:7233"


def seen(**environment: str) -> tuple[str, int | None]:
    machine = this_machine(SERVER, environment=environment)
    return machine.node_id, machine.place


def test_slurm_names_a_task_by_its_node_and_numbers_it():
    task = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "gpu3", "SLURM_LOCALID": "0", "SLURM_PROCID": "3"}
    assert seen(**task) == ("slurm-77-gpu3", 3)
    second = task | {"SLURM_LOCALID": "1", "SLURM_PROCID": "7"}
    assert seen(**second) == ("slurm-77-gpu3-1", 7)
    alone_again = task | {"SLURM_PROCID": "0"}
    assert seen(**alone_again)[0] == "slurm-77-gpu3", "a step for one node begins to count anew"


@pytest.mark.parametrize(
    ("place", "index"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "MPI_LOCALRANKID"),
        ("PALS_RANKID", "PALS_LOCAL_RANKID"),
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
        ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    ],
)
def test_tasks_that_other_launchers_start_on_one_machine_are_several_nodes(place: str, index: str):
    assert seen(**{place: "4", index: "0"}) == (socket.gethostname(), 4)
    assert seen(**{place: "5", index: "1"}) == (f"{socket.gethostname()}-1", 5)
    within_slurm = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "gpu3"}
    assert seen(**within_slurm, **{place: "5", index: "1"}) == ("slurm-77-gpu3-1", 5)


def test_kubernetes_keeps_the_name_of_an_index():
    assert seen(JOB_COMPLETION_INDEX="2") == (socket.gethostname(), 2)
    assert seen() == (socket.gethostname(), None)
    assert seen(SKYPILOT_NODE_RANK="1") == (socket.gethostname(), 1)


def test_an_explicit_value_wins():
    machine = this_machine("nowhere.invalid:1", node_id="me", address="10.1.2.3", environment={"SLURM_JOB_ID": "1"})
    assert (machine.node_id, machine.address) == ("me", "10.1.2.3")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("fd00::2", "fd00::2"),
        ("[fd00::2]", "fd00::2"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("gpu-17.rack_2.example.com", "gpu-17.rack_2.example.com"),
    ],
)
def test_an_address_is_given_as_people_write_it(text: str, address: str):
    assert own_address(text) == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("10.1.2.3:29500", "has a port.* write 10.1.2.3"),
        ("gpu-17:29500", "has a port"),
        ("[fd00::2]:29500", r"has a port.* write \[fd00::2\]"),
        ("fd00::2::1", "is no address"),
        ("two words", "is no address"),
        ("http://gpu-17", "is no address"),
        ("a" * 300, "is no address"),
    ],
)
def test_what_is_no_address_is_refused(text: str, problem: str):
    with pytest.raises(InvalidAddress, match=problem):
        own_address(text)


def test_the_address_is_the_one_on_the_way_to_the_server():
    assert address_towards(SERVER) == "127.0.0.1"
    assert address_towards("[::1]:7233") == "::1"
    with pytest.raises(OSError, match=r"."):
        address_towards("nowhere.invalid:7233")


def test_files_lie_in_the_chosen_folder_or_in_a_temporary_one_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path / "state"))
    assert joined_nodes().folder("a").path == tmp_path / "state" / "nodes" / "a"
    monkeypatch.delenv("PERDURE_STATE")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = joined_nodes().folder("a").path
    assert folder == tmp_path / f"perdure-{os.getuid()}" / "nodes" / "a"
    assert (tmp_path / f"perdure-{os.getuid()}").stat().st_mode & 0o077 == 0


def test_a_temporary_folder_that_another_user_can_have_made_or_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PERDURE_STATE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, mine = tmp_path / f"perdure-{os.getuid()}", tmp_path / "mine"
    mine.mkdir(mode=0o700)
    folder.symlink_to(mine)
    with pytest.raises(PermissionError, match="is a link or a file, and no folder; set PERDURE_STATE"):
        joined_nodes()
    deep = tmp_path / ("deep" * 30) / "nodes"
    with pytest.raises(PermissionError, match="is a link or a file, and no folder; set TMPDIR"):
        _ = NodeFolders(deep).folder("a").run_dir
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written to by other users"):
        joined_nodes()
    assert not list(mine.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_temporary_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PERDURE_STATE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / f"perdure-{os.getuid()}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        joined_nodes()


def test_the_rack_is_given_or_slurm_s():
    slurm = {"SLURM_JOB_ID": "7", "SLURM_TOPOLOGY_ADDR": "core.leaf3.gpu3", "SLURM_TOPOLOGY_ADDR_PATTERN": "s.s.node"}
    assert this_machine(SERVER, environment=slurm).rack == "core.leaf3"
    assert this_machine(SERVER, environment=slurm, rack="r1").rack == "r1"
    assert this_machine(SERVER, environment={"SLURM_TOPOLOGY_ADDR": "gpu3"}).rack == ""
    assert this_machine(SERVER, environment={}).rack == ""
