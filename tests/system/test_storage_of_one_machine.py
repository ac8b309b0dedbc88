"""A whole job one of whose machines has not mounted the storage: no save is durable that it cannot read, and what was
saved before is waited for, with that machine's name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from signal import SIGTERM

import pytest

from perdure.contract import RestoreSource
from tests.support.allocation import REPOSITORY
from tests.support.command_line import PERDURE
from tests.support.waiting import eventually
from tests.system.joined import Machines
from tests.system.made_steps import steps
from tests.system.site import PATIENCE, Site

BEGINS_WITHIN = 2 * PATIENCE
"""Seconds: machines join, ranks start and make a first checkpoint."""
EXAMPLE = REPOSITORY / "examples" / "04-checkpoints" / "plain.py"


def without(storage: Path, empty: Path) -> tuple[str, ...]:
    """The begin of a command that sees an empty folder in place of the storage."""
    return ("unshare", "--mount", "sh", "-c", f'mount --bind "{empty}" "{storage}" && exec "$0" "$@"')


@pytest.mark.long("storage")
@pytest.mark.skipif(os.geteuid() != 0, reason="a machine's own mounts need root")
async def test_what_one_machine_stores_elsewhere_is_no_durable_checkpoint(site: Site, here: Machines, tmp_path: Path):
    storage, empty = tmp_path / "storage", tmp_path / "empty"
    for folder in (storage, empty):
        folder.mkdir()
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(tmp_path / "out")],
        nodes="2",
        backend="joined",
        checkpoint={"storage": f"file://{storage}", "every": 20},
    )
    here.join(job.name, "a")
    here.start(*without(storage, empty), *PERDURE, "join", job.name, "--node-id", "b")
    known = await job.until(lambda status: bool(status.checkpoint.problem), within=BEGINS_WITHIN)
    assert "is missing" in known.checkpoint.problem
    assert "Find out whether each node has mounted the same storage there" in known.checkpoint.problem
    assert known.checkpoint.step is None
    assert known.progress is not None, "the ranks train on"
    assert not [*storage.rglob(".metadata"), *empty.rglob(".metadata")]
    await site.client.cancel(job.name)
    await job.ended()


@pytest.mark.long("storage")
@pytest.mark.skipif(os.geteuid() != 0, reason="a machine's own mounts need root")
async def test_storage_that_one_machine_lacks_is_waited_for_and_named_with_it(
    site: Site, here: Machines, tmp_path: Path
):
    out, storage, empty = tmp_path / "out", tmp_path / "storage", tmp_path / "empty"
    for folder in (storage, empty):
        folder.mkdir()
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        nodes="2",
        backend="joined",
        checkpoint={"storage": f"file://{storage}", "every": 20, "keep_last": 2},
        recovery={"replace_timeout": "30m"},
    )
    job.out = out
    machines = [here.join(job.name, name) for name in ("a", "b")]
    await job.until(lambda status: status.checkpoint.step is not None, within=BEGINS_WITHIN)
    # They end in an orderly way, and their memory with them.
    for one in machines:
        one.signal(SIGTERM)
    for one in machines:
        await one.leave()
    made = len(steps(job, 0))
    here.join(job.name, "a")
    lacking = here.start(*without(storage, empty), *PERDURE, "join", job.name, "--node-id", "b")

    known = await job.until(lambda status: any("is stored" in warning for warning in status.warnings))
    [warning] = [warning for warning in known.warnings if "is stored" in warning]
    assert f"file://{storage} has no step-" in warning
    assert "which node 0 has" in warning or "which node 1 has" in warning or "not mounted on this node" in warning
    assert len(steps(job, 0)) == made, "no step is made below the one that existed"

    subprocess.run(["nsenter", "-t", str(lacking.popen.pid), "--mount", "umount", str(storage)], check=True)
    known = await job.until(lambda status: status.checkpoint.restored_from is RestoreSource.STORAGE)
    await eventually(lambda: steps(job, 0)[made:], within=PATIENCE)
    assert steps(job, 0)[made] == (known.checkpoint.restored_step or 0) + 1
    await site.client.cancel(job.name)
    await job.ended()
