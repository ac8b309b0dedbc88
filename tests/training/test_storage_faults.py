"""A storage that fails as real ones do: it fills up, becomes read-only, loses what it has acknowledged, or is silent.

The training continues, the rank and the job learn why, nothing that was stored is lost, and once the storage works
again, so do checkpoints.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from perdure.agent.checkpoint import keeper
from tests.support.small_disks import small_disk
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import checkpoint_agent
from tests.training.test_durable_checkpoints import Site

WITHIN = 60.0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(keeper, "_LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(keeper, "_FIRST_PAUSE", 0.1)
    with small_disk(tmp_path / "storage", "24m"), checkpoint_agent(tmp_path / "storage", every=1000) as agent:
        yield Site(tmp_path, agent, monkeypatch)


def remount(site: Site, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(site.storage)], check=True)


def filled(value: float) -> dict[str, Any]:
    """A model of 9 MB."""
    model = nn.Linear(1500, 1500, bias=False)
    nn.init.constant_(model.weight, value)
    return {"model": model, "step": int(value)}


def is_filled(state: dict[str, Any], value: float) -> bool:
    return bool(state["model"].weight.eq(value).all()) and state["step"] == int(value)


def test_a_disk_that_is_full_in_the_middle_of_a_part_costs_this_checkpoint_alone(site: Site):
    checkpointer, _ = site.begin(filled(0))
    assert checkpointer.save(1, filled(1), durable=True)
    assert checkpointer.wait_until_durable(WITHIN)
    (site.storage / "another's").write_bytes(bytes(12 << 20))
    assert checkpointer.save(2, filled(2), durable=True)
    [problem] = wait_for(lambda: site.agent.problems, within=WITHIN)
    assert "No space left on device" in problem
    part = site.storage / "step-2-run-1" / "__0_0.distcp"
    assert 0 < part.stat().st_size < 9_000_000, "it was full in the middle"
    for step in range(3, 6):
        assert checkpointer.save(step, filled(step)), "memory keeps steps meanwhile"
        checkpointer.flush()
    assert not checkpointer.wait_until_durable(0.5)
    assert [folder.name for folder in site.folders] == ["step-1-run-1"]
    (site.storage / "another's").unlink()
    assert checkpointer.wait_until_durable(WITHIN)
    assert [folder.name for folder in site.folders] == ["step-2-run-1", "step-1-run-1"]
    again = filled(0)
    assert site.begin(again, lose_memory=True)[1] == 2
    assert is_filled(again, 2)


@pytest.mark.long("storage")
def test_a_storage_that_may_not_be_written_any_more_still_gives_what_it_has(site: Site):
    checkpointer, _ = site.begin(filled(0))
    assert checkpointer.save(1, filled(1), durable=True)
    assert checkpointer.wait_until_durable(WITHIN)
    remount(site, "ro")
    assert checkpointer.save(2, filled(2), durable=True)
    [problem] = wait_for(lambda: site.agent.problems, within=WITHIN)
    assert "Read-only file system" in problem
    assert checkpointer.save(3, filled(3))
    checkpointer.flush()
    again = filled(0)
    checkpointer, step = site.begin(again, lose_memory=True)
    assert (step, is_filled(again, 1)) == (1, True)
    remount(site, "rw")
    assert checkpointer.save(2, filled(2), durable=True)
    assert checkpointer.wait_until_durable(WITHIN)
    again = filled(0)
    assert site.begin(again, lose_memory=True)[1] == 2
    assert is_filled(again, 2)
