"""Checkpoints in a real S3 server that is killed in the middle of an upload and comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader

from perdure.agent.checkpoint import commits
from perdure.contract import CheckpointStored
from tests.support.object_store import ObjectStore, object_store
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import checkpoint_agent
from tests.training.test_durable_checkpoints import Site

pytestmark = [pytest.mark.long("storage"), pytest.mark.timeout(900)]

WITHIN = 300.0
WIDTH = 6000
"""The model has 144 MB: s3fs uploads it in three parts."""
FOLDER = "nlp/llama/checkpoints"


@pytest.fixture
def store(object_store_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps the address of its server
    with object_store(object_store_program, tmp_path / "objects", bucket="nlp") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def site(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with checkpoint_agent(f"s3://{FOLDER}", every=1000, keep_last=2) as agent:
        yield Site(tmp_path, agent, monkeypatch)


def filled(value: float) -> dict[str, Any]:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.constant_(model.weight, value)
    return {"model": model, "step": 0}


def committed(store: ObjectStore) -> list[str]:
    return sorted(path.parent.name for path in store.folder.glob(f"{FOLDER}/*/.metadata"))


def test_a_server_that_is_killed_in_the_middle_of_an_upload_gets_it_again(
    store: ObjectStore, site: Site, caplog: pytest.LogCaptureFixture
):
    state = filled(1.0)
    checkpointer, step = site.begin(state)
    assert step is None
    assert checkpointer.save(1, state, durable=True)
    assert checkpointer.wait_until_durable(WITHIN)
    assert committed(store) == ["step-1-run-1"]
    nn.init.constant_(state["model"].weight, 2.0)
    assert checkpointer.save(2, state, durable=True)
    wait_for(lambda: any(part.stat().st_size > 1_000_000 for part in store.uploads), within=WITHIN)
    store.kill()
    assert not (store.folder / FOLDER / "step-2-run-1/__0_0.distcp").exists(), "the upload was not complete"
    wait_for(lambda: site.agent.problems, within=WITHIN)
    # Training and its snapshots continue meanwhile.
    for number in range(3, 8):
        assert checkpointer.save(number, state)
        checkpointer.flush()
    store.start()
    assert checkpointer.wait_until_durable(WITHIN)
    assert committed(store) == ["step-1-run-1", "step-2-run-1"]
    again = filled(0.0)
    store.kill()
    with store.restarted_when(lambda: "waits for the storage" in caplog.text):
        assert site.begin(again, lose_memory=True)[1] == 2
    assert again["model"].weight.eq(2.0).all()
    alone = filled(0.0)["model"].state_dict()
    state_dict_loader.load({"model": alone}, checkpoint_id=store.folder / FOLDER / "step-2-run-1")
    assert alone["weight"].eq(2.0).all()


def test_a_server_that_is_away_when_a_checkpoint_is_committed_is_asked_again(store: ObjectStore, site: Site):
    state = filled(1.0)
    checkpointer, _ = site.begin(state)
    site.agent.commits = False
    assert checkpointer.save(1, state, durable=True)
    [stored] = wait_for(lambda: site.agent.of(CheckpointStored), within=WITHIN)
    store.kill()
    site.agent.commit(stored)
    [problem] = wait_for(lambda: site.agent.commit_problems, within=WITHIN)
    assert "connect" in problem.lower()
    store.start()
    assert committed(store) == []
    assert checkpointer.wait_until_durable(WITHIN)
    assert committed(store) == ["step-1-run-1"]


def test_a_server_that_is_silent_delays_a_checkpoint_and_no_step(
    store: ObjectStore, site: Site, caplog: pytest.LogCaptureFixture
):
    state: dict[str, Any] = {"model": nn.Linear(100, 100), "step": 1}
    checkpointer, _ = site.begin(state)
    assert checkpointer.save(1, state, durable=True)
    assert checkpointer.wait_until_durable(WITHIN)
    with store.silent():
        state["step"] = 2
        assert checkpointer.save(2, state, durable=True)
        begun = time.monotonic()
        for number in range(3, 8):
            assert checkpointer.save(number, state), "memory keeps steps meanwhile"
            checkpointer.flush()
        assert time.monotonic() - begun < WITHIN / 10, "no save waits for the server"
        assert not checkpointer.wait_until_durable(1)
        assert "step 2 is not durable: not stored within 1 s" in caplog.text
    assert checkpointer.wait_until_durable(WITHIN)
    assert committed(store) == ["step-1-run-1", "step-2-run-1"]


def test_an_object_that_is_deleted_before_the_commit_makes_no_checkpoint(
    store: ObjectStore, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(commits, "_LISTED_WITHIN", 1.0)
    state: dict[str, Any] = {"model": nn.Linear(100, 100), "step": 1}
    checkpointer, _ = site.begin(state)
    site.agent.commits = False
    assert checkpointer.save(1, state, durable=True)
    [stored] = wait_for(lambda: site.agent.of(CheckpointStored), within=WITHIN)
    (store.folder / FOLDER / "step-1-run-1/__0_0.distcp").unlink()
    site.agent.commit(stored)
    assert not checkpointer.wait_until_durable(WITHIN)
    assert "lacks what nodes have stored: __0_0.distcp is missing" in caplog.text
    assert committed(store) == []
    site.agent.commits = True
    assert checkpointer.save(2, state, durable=True)
    assert checkpointer.wait_until_durable(WITHIN)
    assert committed(store) == ["step-2-run-1"]


def test_a_flipped_bit_in_storage_is_found_and_an_older_checkpoint_loaded(store: ObjectStore, site: Site):
    state = filled(1.0)
    checkpointer, _ = site.begin(state)
    for number in (1, 2):
        nn.init.constant_(state["model"].weight, float(number))
        assert checkpointer.save(number, state, durable=True)
        assert checkpointer.wait_until_durable(WITHIN)
    with (store.folder / FOLDER / "step-2-run-1/__0_0.distcp").open("r+b") as file:
        file.seek(100_000_000)
        file.write(b"\x01")
    again = filled(0.0)
    assert site.begin(again, lose_memory=True)[1] == 1
    assert torch.equal(again["model"].weight, torch.ones(WIDTH, WIDTH))
