"""Tests of the address of a rank's process group, by the script's request; `test_launchers` uses real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure_launcher.unmanaged_training.in_rank import RankPlace

STORE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29700"}
OWN = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}


def place(*, rank: int = 1, world_size: int = 4, local_world_size: int = 2) -> RankPlace:
    return RankPlace(
        address="10.0.0.1",
        port="29700",
        rank=rank,
        world_size=world_size,
        local_world_size=local_world_size,
        progress=Path("/nowhere/progress"),
    )


@pytest.mark.parametrize(
    ("url", "environment", "corrected"),
    [
        ("env://", STORE, "env://"),
        ("env://?rank=0&world_size=8", STORE, "env://?rank=0&world_size=8"),
        ("tcp://10.0.0.1:29700?rank=1&world_size=4", OWN, "tcp://10.0.0.1:29700?rank=1&world_size=4"),
        ("env://", OWN, "env://?"),
        ("tcp://node-0:23456?rank=1&world_size=4", STORE, "env://?rank=1&world_size=4"),
        ("tcp://node-0:23456?rank=0&world_size=2", STORE, "tcp://node-0:23456?rank=0&world_size=2"),
    ],
    ids=["ours", "ours-for-more-ranks", "ours-by-tcp", "own-master", "own-tcp", "another-world-that-others-reach"],
)
def test_the_jobs_own_ranks_meet_at_its_store(
    url: str, environment: dict[str, str], corrected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place().job_url(url) == corrected


def test_a_world_of_its_own_on_one_node_is_the_scripts_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    spawned = "env://?rank=0&world_size=8"
    assert place(world_size=2, local_world_size=2).job_url(spawned) == spawned


@pytest.mark.parametrize("launched", ["0", "1"])
def test_a_place_that_a_launcher_within_the_script_sets_by_variables_is_its_own(
    launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OWN, "RANK": launched, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert place(rank=0, world_size=1, local_world_size=1).job_url("env://") == "env://"


def test_an_environment_without_a_store_gives_no_place() -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    whole = {**rank, "PERDURE_STORE": "fd00::1:29700", "PERDURE_PROGRESS_DIR": "/run/progress"}
    found = RankPlace.of(whole)
    assert found is not None
    assert (found.address, found.port, found.rank) == ("fd00::1", "29700", 1)
    for name in whole:
        assert RankPlace.of({key: value for key, value in whole.items() if key != name}) is None
