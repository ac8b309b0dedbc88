"""Real jobs of which each part is lost in turn: each state loses what the table of the guide says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perdure.contract import JobPhase
from scripts.losses import LOSSES, Died, Kind, Loss
from tests.system.kept_states import STEPS, KeptStates, keep_states
from tests.system.site import Site

KINDS = {"replicated": Kind.REPLICATED, "split": Kind.SPLIT}

FAULTS: dict[Died, Callable[[KeptStates], object]] = {
    Died.RANK: lambda training: training.job.signal(1, "rank"),
    Died.LAUNCHER: lambda training: training.job.signal(1, "launcher"),
    Died.NODE: lambda training: training.end(1),
    Died.NEIGHBOURS: lambda training: training.end(0, 1),
    Died.ALL: lambda training: training.end(0, 1, 2),
}
"""In a job of three nodes."""


@pytest.mark.long("survival")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stored", [False, True])
async def test_each_state_loses_what_the_guide_says(own_site: Site, stored: bool):
    storage = {"storage": f"file://{own_site.folder / 'storage'}", "every": 1_000_000}
    spec: dict[str, Any] = {"checkpoint": storage} if stored else {}
    training = await keep_states(own_site, *KINDS, nodes="3", **spec)
    await training.stepping()
    job, wrong = training.job, list[str]()

    async def after(died: Died, *, world_size: int = 3) -> None:
        since = training.generation
        await training.stepping(world_size=world_size)
        lost, restored = training.lost(since=since), training.restored()
        for name, kind in KINDS.items():
            cell = LOSSES[died][kind]
            expected = cell.stored if stored else cell.without
            is_right = {
                Loss.NOTHING: lost[name] <= 1,
                Loss.CHECKPOINT: name in durable and restored[name] >= durable[name],
                Loss.ALL: restored[name] == 0,
            }
            if not is_right[expected]:
                wrong.append(f"{died}: {name} lost {lost[name]} steps, down to {restored[name]}, not {expected}")

    for died, dies in FAULTS.items():
        durable = await training.store() if stored else {}
        await training.trains_on()
        dies(training)
        await after(died)

    own_site.control_plane.kill_worker()
    own_site.control_plane.kill_server()
    await training.trains_on(steps=3 * STEPS)
    await own_site.control_plane.ensure()
    assert training.lines[-1].generation == training.generation, "a world has ended"

    training.set_capacity(2)
    await job.client.scale(job.name, nodes="2:3")
    training.end(2)
    await after(Died.SHRINKS, world_size=2)
    training.set_capacity(3)
    await after(Died.GROWS)

    durable = await training.store() if stored else {}
    await job.client.suspend(job.name)
    await job.until(lambda status: status.phase is JobPhase.SUSPENDED)
    await job.ended()
    await job.client.resume(job.name)
    await after(Died.SUSPENDED)
    assert not wrong, "\n".join(wrong)
