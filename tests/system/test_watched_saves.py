"""A script that cannot be changed, whose own saves on its node's disk are copied, and come back on another node."""

from __future__ import annotations

import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("saves_itself.py")


def copied(storage: Path) -> list[int]:
    """The steps in the storage that are complete."""
    manifests = (storage / "watched" / "worker-0").glob("*/manifest.json")
    return sorted(int(path.stem[5:]) for manifest in manifests for path in manifest.parent.glob("files/step-*.pt"))


def saves(job: Job) -> Path:
    [rank] = [one for one in job.processes(0) if str(SCRIPT) in one.cmdline()]
    return Path(rank.environ()["PERDURE_RUN_DIR"]) / "saves"


def repeated_first(job: Job, made: int) -> int | None:
    """The first step that was made again, after so many lines."""
    pairs = pairwise(job.steps()[made - 1 :])
    return next((after.number for before, after in pairs if after.number <= before.number), None)


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
