"""A script that cannot be changed, whose own saves on its node's disk are copied, and come back on another node."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from perdure.contract import JobPhase
from tests.support.command_line import PERDURE
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("saves_itself.py")


def copied(storage: Path) -> list[int]:
    """The steps in the storage that are complete."""
    manifests = (storage / "watched" / "worker-0").glob("*/manifest.json")
    return sorted(int(path.stem[5:]) for manifest in manifests for path in manifest.parent.glob("files/step-*.pt"))


def kept_by(job: Job, rank: int, *, of: int) -> list[int]:
    """The complete steps of one node in the memory of another one."""
    folders = [
        owner.parent
        for owner in Path("/dev/shm").glob("perdure-copies-*/owner")
        if owner.read_text().startswith(f"{job.uid}/worker-{rank}/")
    ]
    manifests = (path for folder in folders for path in folder.glob(f"worker-{of}/watched/worker-{of}/*/manifest.json"))
    return sorted(int(path.stem[5:]) for manifest in manifests for path in manifest.parent.glob("files/step-*.pt"))


def saves(job: Job) -> Path:
    [rank] = [one for one in job.processes(0) if str(SCRIPT) in one.cmdline()]
    return Path(rank.environ()["PERDURE_RUN_DIR"]) / "saves"


def repeated_first(job: Job, made: int) -> int | None:
    """The first step that was made again, after so many lines."""
    pairs = pairwise(job.steps()[made - 1 :])
    return next((after.number for before, after in pairs if after.number <= before.number), None)


@pytest.mark.long("storage")
async def test_a_node_that_waits_for_its_storage_is_named_with_the_reason(site: Site, tmp_path: Path):
    storage, out = tmp_path / "storage", tmp_path / "out"
    out.mkdir()
    storage.mkdir()
    away = storage / "watched"
    away.touch()
    job = await site.submit(
        nodes="1",
        command=[sys.executable, str(SCRIPT), str(out), str(tmp_path / "saves")],
        checkpoint={"storage": f"file://{storage}", "watch": str(tmp_path / "saves")},
        recovery={"warm_starts": False},
    )
    job.out = out
    known = await job.until(lambda status: any("NotARegularFile" in text for text in status.warnings))
    [warning] = known.warnings
    assert re.match(
        r"node 0: its command waits since \d\d:\d\d:\d\d UTC until .*/saves is restored from file://", warning
    )
    assert known.phase is JobPhase.STARTING
    assert warning in known.reason
    explained = await asyncio.to_thread(
        subprocess.run,
        [*PERDURE, "explain", job.name],
        env={**os.environ, "PERDURE_STATE": str(site.state.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "NotARegularFile" in " ".join(explained.stdout.split())
    [node] = await job.client.nodes(job.name)
    assert f"node 0: {node.reason}" == warning
    assert not job.processes(0, kind="rank")
    away.unlink()
    await job.until(lambda status: not status.warnings)
    await eventually(lambda: copied(storage), within=PATIENCE)
    assert not (await job.status()).warnings
    assert [node.reason for node in await job.client.nodes(job.name)] == [""]


@pytest.mark.long("storage")
async def test_a_replaced_node_continues_from_what_its_script_had_saved(site: Site, tmp_path: Path):
    storage, out = tmp_path / "storage", tmp_path / "out"
    out.mkdir()
    script = shlex.join([sys.executable, str(SCRIPT), str(out)])
    job = await site.submit(
        nodes="1",
        command=["sh", "-c", f'exec {script} "$PERDURE_RUN_DIR/saves"'],
        checkpoint={"storage": f"file://{storage}", "watch": "$PERDURE_RUN_DIR/saves"},
        recovery={"warm_starts": False},
    )
    job.out = out
    await eventually(lambda: copied(storage), within=PATIENCE)
    # What a process leaves that is killed while it saves, with the name of the newest save.
    folder = saves(job)
    whole = next(iter(folder.glob("step-*.pt"))).read_bytes()
    (folder / "step-999999.pt").write_bytes(whole[: len(whole) // 2])
    seen = copied(storage)[-1]
    await eventually(lambda: copied(storage)[-1] > seen, within=PATIENCE)
    newest, made = copied(storage)[-1], len(job.steps())
    job.signal(0, None)
    first = await eventually(lambda: repeated_first(job, made), within=PATIENCE)
    assert first % 50 == 1
    assert first > newest
    assert 999_999 not in copied(storage)
    assert not (await job.status()).warnings
    assert [incident.culprit for incident in await job.incidents()] == [0]
    # The last save is copied after the script has ended.
    job.finish()
    await job.client.wait(job.name)
    await job.ended()
    assert copied(storage)[-1] == job.steps()[-1].number // 50 * 50


@pytest.mark.long("storage")
async def test_a_replaced_node_gets_its_saves_back_from_another_node(site: Site, tmp_path: Path):
    out = tmp_path / "out"
    for rank in (0, 1):
        (out / str(rank)).mkdir(parents=True)
    script = shlex.join([sys.executable, str(SCRIPT)])
    # Each node saves in its own run directory, which its replacement does not have.
    job = await site.submit(
        nodes="2",
        command=["sh", "-c", f'exec {script} {shlex.quote(str(out))}/"$GROUP_RANK" "$PERDURE_RUN_DIR/saves"'],
        checkpoint={"watch": "$PERDURE_RUN_DIR/saves"},
        recovery={"warm_starts": False},
    )
    job.out = out / "1"
    await eventually(lambda: kept_by(job, 0, of=1) and kept_by(job, 1, of=0), within=PATIENCE)
    newest, made = kept_by(job, 0, of=1)[-1], len(job.steps())
    job.signal(1, None)
    first = await eventually(lambda: repeated_first(job, made), within=PATIENCE)
    assert first % 50 == 1
    assert first > newest
    # The replacement keeps the copies of the other one again.
    await eventually(lambda: kept_by(job, 1, of=0), within=PATIENCE)
    assert not (await job.status()).warnings
    assert [incident.culprit for incident in await job.incidents()] == [1]
    for rank in (0, 1):
        (out / str(rank) / "finish").touch()
    await job.client.wait(job.name)
    await job.ended()
    await eventually(lambda: not kept_by(job, 0, of=1) and not kept_by(job, 1, of=0), within=PATIENCE)
