"""`make demo-roles`: reinforcement learning of three roles, each of whose nodes is killed in turn.

It prints a table of what was killed: how soon it worked again, what else was restarted, and how many trajectories were
lost or learned twice. It compares the return with that of an undisturbed run, and ends with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

from rich.table import Table

from examples.demo.learning import REWARD, ROLLOUT, TRAINER, Fault, Learning
from examples.demo.places import ended
from examples.demo.stage import play, stage
from examples.demo.trajectories import read_trained
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.local.control_plane import LocalControlPlane

NOISE = 0.1
"""The largest difference of the returns of two runs that are alike: the order of trajectories is not the same."""
BETWEEN_FAULTS = 5.0


def table(faults: list[Fault]) -> Table:
    table = Table(title="What was killed, and what came of it", title_justify="left")
    for column in ("killed", "worked again after", "others restarted", "trajectories lost", "learned twice"):
        table.add_column(column)
    for one in faults:
        row = (f"{one.recovered_s:.1f} s", str(one.other_restarts), str(one.lost), str(one.doubled))
        table.add_row(f"the {one.fault} of {one.role}", *row)
    return table


async def learn(learning: Learning, say: Callable[[str], None]) -> tuple[list[Fault], JobPhase]:
    """Runs the job to its end, and kills a node of each role meanwhile."""
    try:
        await learning.start()
        say("2 trainers, 2 rollouts and a reward model learn")
        faults: list[Fault] = []
        for role in (ROLLOUT, REWARD, TRAINER):
            await asyncio.sleep(BETWEEN_FAULTS)
            say(f"[red]kill -9 of a whole node of {role}[/], at step {learning.step}")
            faults.append(await learning.kill(role, 0, whole_node=True))
            say(f"  it works again after {faults[-1].recovered_s:.1f} s")
        say("no more faults: training continues to the end")
        result = await learning.wait()
        say(f"[bold]{result.phase}[/]: {result.reason}")
        return faults, result.phase
    finally:
        await learning.end()


async def learn_alone(learning: Learning) -> None:
    """Runs the job without faults."""
    try:
        await learning.start()
        await learning.wait()
    finally:
        await learning.end()


async def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo-roles", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="length of the training")
    parser.add_argument("--keep", action="store_true", help="keep the folder with state, logs and trajectories")
    options = parser.parse_args()
    with stage(keep=options.keep, width=120) as on:
        plane = LocalControlPlane(StateFolder(on.folder / "state"), report=on.say)
        async with ended(plane), Client(endpoint=await plane.ensure()) as client:
            learning = Learning(client, on.folder / "out", steps=options.steps)
            faults, phase = await learn(learning, on.say)
            if phase is not JobPhase.SUCCEEDED:
                return 1
            on.say("the same training once more, without faults")
            alone = Learning(client, on.folder / "alone", steps=options.steps, name="alone")
            await learn_alone(alone)
            trained = read_trained(learning.out)
            on.console.print(table(faults))
            on.console.print(f"Return: {learning.score:.2f} with faults, {alone.score:.2f} without.")
            on.console.print(f"Trajectories: {trained.lost} lost, {trained.doubled} learned twice.")
            wrong = trained.lost or trained.doubled or any(fault.other_restarts for fault in faults)
            differs = abs(learning.score - alone.score) > NOISE
            return 1 if wrong or differs else 0


if __name__ == "__main__":
    play(main)
