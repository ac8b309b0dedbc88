"""Tests that workers of one machine only have local nodes in a state folder, and that PIDs of others are left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from perdure.activities.nodes.local import claim
from perdure.activities.nodes.local.claim import Claim, claimed
from perdure.activities.nodes.local.processes import ProcessIdentity
from perdure.activities.nodes.local.spawn import boot_id, pid_namespace, started_ticks
from perdure.base.errors import StateFolderError
from tests.support.waiting import DEADLINE

HERE = Claim(boot="b1", namespace="pid:[1]", host="here", machine="m1")
ELSEWHERE = Claim(boot="b2", namespace="pid:[1]", host="elsewhere", machine="m2")
CONTAINER = HERE.model_copy(update={"namespace": "pid:[2]", "host": "container"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "RENEWED_EVERY", 0.02)
    monkeypatch.setattr(claim, "ABANDONED_AFTER", DEADLINE)
    monkeypatch.setattr(claim, "_LOOK", 0.02)


def runs_on(machine: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Claim, "own", classmethod(lambda cls: machine))


@pytest.mark.parametrize("other", [ELSEWHERE, CONTAINER])
async def test_a_worker_is_refused_where_one_on_another_machine_has_local_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Claim
):
    runs_on(HERE, monkeypatch)
    async with claimed(tmp_path):
        # A further worker of the machine, which ends before the first.
        async with claimed(tmp_path):
            pass
        runs_on(other, monkeypatch)
        with pytest.raises(StateFolderError, match="has the nodes of a worker on here, which runs"):
            async with claimed(tmp_path):
                pass


async def test_a_folder_whose_workers_have_ended_is_the_next_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(claim, "ABANDONED_AFTER", 0.1)
    runs_on(HERE, monkeypatch)
    async with claimed(tmp_path):
        pass
    runs_on(ELSEWHERE, monkeypatch)
    async with claimed(tmp_path):
        pass


async def test_a_machine_that_was_booted_again_has_its_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(claim, "_lives", None)
    runs_on(HERE, monkeypatch)
    async with claimed(tmp_path):
        pass
    runs_on(HERE.model_copy(update={"boot": "b9", "namespace": "pid:[9]"}), monkeypatch)
    async with claimed(tmp_path):
        pass


async def test_a_worker_ends_when_another_machine_has_taken_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs_on(HERE, monkeypatch)
    lost = asyncio.Event()
    async with claimed(tmp_path, lost=lost.set):
        (tmp_path / "machine.json").write_text(ELSEWHERE.model_dump_json())
        await asyncio.wait_for(lost.wait(), DEADLINE)
    assert Claim.model_validate_json((tmp_path / "machine.json").read_bytes()) == ELSEWHERE


@pytest.mark.parametrize("changed", [{"boot": "another"}, {"namespace": "pid:[another]"}])
async def test_a_pid_of_another_machine_is_neither_looked_at_nor_signaled(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
):
    own = os.getpid()
    identity = ProcessIdentity(pid=own, started=started_ticks(own) or 0, boot=boot_id(), namespace=pid_namespace())
    assert identity.alive

    def forbidden(*_: object) -> int:
        raise AssertionError("another process was looked at")

    elsewhere = identity.model_copy(update=changed)
    monkeypatch.setattr(os, "pidfd_open", forbidden)
    monkeypatch.setattr(signal, "pidfd_send_signal", forbidden)
    monkeypatch.setattr("perdure.activities.nodes.local.processes.started_ticks", forbidden)
    assert not elsewhere.alive
    await elsewhere.kill()
    await elsewhere.wait_until_gone()
