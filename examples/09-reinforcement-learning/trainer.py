"""Learns from the trajectories of the rollout, and saves its policy, its optimizer and its place in the queue together.

It writes down which trajectories each step was made of, so that those that are lost or learned twice can be counted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from grid import Trajectory
from torch.nn.parallel import DistributedDataParallel
from world import loss_of, make_policy

from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.roles.queue import Consumer

OUT = Path(os.environ["OUT"])
STEPS = int(os.environ.get("STEPS", "400"))
BATCH = 8
"""Trajectories of a step, on each rank."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, generation = dist.get_rank(), os.environ.get("PERDURE_GENERATION", "0")
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    queue = Consumer("trajectories", OUT / "trajectories", producers=8)
    checkpointer = Checkpointer(every=1, replicated=True)
    state = {"policy": policy, "optimizer": optimizer, "queue": queue, "step": 0, "baseline": 0.0}
    checkpointer.restore(state)
    parallel = DistributedDataParallel(policy)
    with (OUT / f"trained-{rank}.csv").open("a", buffering=1) as log:
        while state["step"] < STEPS:
            batch: list[Trajectory] = [queue.get() for _ in range(BATCH)]
            step = state["step"] + 1
            # Before the gradients are shared: from then on the step counts where any rank saves it.
            log.write(f"{time.time():.3f},{generation},{step},{' '.join(one.name for one in batch)}\n")
            loss = loss_of(parallel, batch, state["baseline"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue.step()
            score = torch.tensor([sum(one.score for one in batch) / BATCH])
            dist.all_reduce(score)
            state["baseline"] += 0.05 * (score.item() / dist.get_world_size() - state["baseline"])
            state["step"] = step
            checkpointer.save(step, state)
            report(step=step, total=STEPS)
            if rank == 0:
                draft = OUT / "weights.draft"
                torch.save(policy.state_dict(), draft)
                draft.replace(OUT / "weights.pt")
                if step % 20 == 0:
                    print(f"step {step}: return {state['baseline']:.3f}", flush=True)
    if rank == 0:
        queue.close()
        (OUT / "return").write_text(f"{state['baseline']:.4f}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
