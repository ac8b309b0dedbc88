"""Real jobs whose split state goes on in a world of another size while something else happens: no step is lost."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from perdure.contract import JobPhase
from perdure.local import control_plane
from tests.support.small_disks import small_disk
from tests.support.waiting import eventually
from tests.system.kept_states import KeptStates, keep_states
from tests.system.site import PATIENCE, Site

pytestmark = [pytest.mark.long("survival"), pytest.mark.timeout(900)]

SERVES = "import time\nwhile True: time.sleep(60)"


async def shrinks(training: KeptStates) -> None:
    """Loses a node for which there is no replacement."""
    training.set_capacity(2)
    training.end(2)
    await training.stepping(world_size=2)


async def grows(training: KeptStates) -> None:
    training.set_capacity(3)
    await training.stepping(world_size=3)


def assert_nothing_is_lost(training: KeptStates) -> None:
    """Of each world but the last, at most the step that was in progress."""
    generations = {line.generation for line in training.lines}
    lost = training.lost(since=min(generations))
    assert all(steps < len(generations) for steps in lost.values()), (lost, generations)
    assert all(step > 0 for step in training.restored().values())


async def test_a_job_is_resumed_in_another_size(own_site: Site):
    storage = f"file://{own_site.folder / 'storage'}"
    training = await keep_states(own_site, "split", checkpoint={"storage": storage, "every": 1_000_000})
    job = training.job
    await training.stepping(world_size=3)
    reached = training.lines[-1].steps["split"]
    await job.client.suspend(job.name)
    await job.until(lambda status: status.phase is JobPhase.SUSPENDED)
    await job.ended()
    training.set_capacity(2)
    await job.client.resume(job.name)
    await training.stepping(world_size=2)
    assert training.restored()["split"] >= reached
    since = training.generation
    await grows(training)
    assert training.lost(since=since)["split"] <= 1


async def test_a_job_is_reset_in_a_world_of_another_size(own_site: Site):
    training = await keep_states(own_site, "split")
    await training.stepping(world_size=3)
    await shrinks(training)
    await own_site.temporal(
        *("workflow", "reset", "--workflow-id", training.job.workflow_id, "--type", "FirstWorkflowTask"),
        *("--reason", "a test"),
    )
    await training.stepping(world_size=2)
    await grows(training)
    assert_nothing_is_lost(training)


async def test_a_job_that_continues_as_new_shrinks_and_grows(own_site: Site, monkeypatch: pytest.MonkeyPatch):
    await own_site.control_plane.stop_worker()
    await own_site.control_plane.stop_server()
    suggests = (("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=40"),)
    monkeypatch.setattr(control_plane, "SERVER_OPTIONS", (*control_plane.SERVER_OPTIONS, *suggests))
    await own_site.start()
    training = await keep_states(own_site, "split")
    handle = (await own_site.client.connect()).get_workflow_handle(training.job.workflow_id)
    first_run = (await handle.describe()).run_id
    await training.stepping(world_size=3)
    await shrinks(training)
    await grows(training)
    assert (await handle.describe()).run_id != first_run
    assert_nothing_is_lost(training)


async def test_a_node_is_lost_while_the_worker_is_away(own_site: Site):
    training = await keep_states(own_site, "split")
    await training.stepping(world_size=3)
    training.set_capacity(2)
    own_site.control_plane.kill_worker()
    victims = training.job.processes(2)
    training.end(2)
    await asyncio.to_thread(lambda: [process.wait(PATIENCE) for process in victims])
    await own_site.start()
    await training.stepping(world_size=2)
    await grows(training)
    assert_nothing_is_lost(training)


async def test_one_of_two_roles_shrinks_and_grows(own_site: Site):
    serves = {"nodes": 1, "command": [sys.executable, "-c", SERVES]}
    training = await keep_states(own_site, "split", others={"serves": serves})
    await training.stepping(world_size=3)
    training.set_capacity(3)
    training.end(2)
    await training.stepping(world_size=2)
    training.set_capacity(4)
    await training.stepping(world_size=3)
    assert_nothing_is_lost(training)
    generations = {role.name: role.generation for role in (await training.job.status()).by_role}
    assert generations == {"worker": training.generation, "serves": 1}


async def test_a_split_and_a_replicated_state_of_one_job_go_on_at_the_same_step(own_site: Site):
    training = await keep_states(own_site, "split", "replicated")
    await training.stepping(world_size=3)
    await shrinks(training)
    await grows(training)
    assert_nothing_is_lost(training)
    restored = training.restored()
    assert restored["split"] == restored["replicated"]


async def test_the_storage_is_gone_while_a_world_shrinks_and_grows(own_site: Site):
    storage = own_site.folder / "storage"
    checkpoint = {"storage": f"file://{storage}", "every": 1_000_000}
    training = await keep_states(own_site, "split", checkpoint=checkpoint)
    await training.stepping(world_size=3)
    await training.store()
    await training.trains_on()
    storage.rename(away := storage.with_name("unmounted"))
    storage.touch()
    await shrinks(training)
    assert_nothing_is_lost(training)
    storage.unlink()
    away.rename(storage)
    await grows(training)
    assert_nothing_is_lost(training)


async def test_a_world_shrinks_although_the_memory_of_a_node_is_full(own_site: Site):
    """There is no room for the snapshots of both worlds: the former one's make room, and copies are refused."""
    training = await keep_states(own_site, "split", waits=True)
    job = training.job
    await eventually(lambda: len(job.processes(kind="rank")) == 3, within=PATIENCE)
    [rank] = job.processes(1, kind="rank")
    memory = Path(rank.environ()["PERDURE_MEMORY_DIR"])
    with small_disk(memory, "1m"):
        (job.out / "go").touch()
        await training.stepping(world_size=3)
        with suppress(OSError), (memory / "others").open("wb", buffering=0) as others:
            while True:
                others.write(bytes(4096))
        await shrinks(training)
        assert_nothing_is_lost(training)
        job.signal(0, "rank")
        await training.stepping(world_size=2)
        assert_nothing_is_lost(training)
        await own_site.end_jobs()
    shutil.rmtree(memory, ignore_errors=True)
