"""The job of `make bench-state`: a model that FSDP2 splits over the ranks, with AdamW.

BENCH_WAY says how its state outlives a world: `memory`, Perdure's snapshots with a copy on another node; `storage`, the
same without copies, so that a lost node's part is left in the job's storage only; `dcp`, `torch.distributed.checkpoint`
alone, into a folder each BENCH_EVERY steps. A batch follows from the step, the rank and the size of the world, so that
losses can be compared bit for bit.

In the folder that BENCH_FOLDER names each rank appends a line per step to `steps.log`, `time step rank world_size pid`,
and to `losses.log`, `step rank world_size loss`, and one per process to `loads.log`, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.state.lacking import WIDTH, layers_of
from perdure_training.checkpoint import Checkpointer
from perdure_training.events import TrainerEvents
from perdure_training.snapshots.arena import Arena

LAST_STEP = 1_000_000
BATCH = 8


class Memory:
    """Perdure's snapshots, and its storage where the job has one."""

    def __init__(self, state: dict[str, Any], *, copies: int) -> None:
        self._state = state
        # Each step, so that none is lost.
        self._checkpointer = Checkpointer(every=1, copies=copies)

    def restore(self) -> dict[str, Any]:
        """Loads the newest step; returns what is known of that."""
        found = Arena(Path(os.environ["PERDURE_MEMORY_DIR"], f"stage-{os.environ['PERDURE_STAGE']}", "state"))
        here = [[one.step, one.generation, one.world_size, one.rank] for _, one in found.snapshots()]
        self._checkpointer.restore(self._state)
        TrainerEvents().flush()
        events = (
            Path(os.environ["PERDURE_PROGRESS_DIR"]).parent / "events" / f"local-rank-{os.environ['LOCAL_RANK']}.jsonl"
        )
        ends = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
        loaded = next(
            event["attributes"]
            for event in reversed(ends)
            if (event["name"], event["type"], event["pid"]) == ("load_checkpoint", "end", os.getpid())
        )
        return {"here": here, **loaded}

    def save(self, step: int) -> None:
        self._checkpointer.save(step, self._state)


class Distributed:
    """PyTorch's own checkpoints in a folder of the machine's disk, as its documentation has them."""

    def __init__(self, state: dict[str, Any], folder: Path, *, every: int) -> None:
        self._state = state
        self._folder = folder
        self._every = every

    def restore(self) -> dict[str, Any]:
        """Loads the newest checkpoint that is complete."""
        # Its metadata is written last.
        steps = [int(found.parent.name) for found in self._folder.glob("*/.metadata")]
        if not steps:
            return {"loaded_step": None}
        content = self._content()
        load(content, checkpoint_id=self._folder / str(max(steps)))
        model, optimizer = self._state["model"], self._state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        self._state["step"] = content["step"]
        return {"loaded_step": self._state["step"]}

    def save(self, step: int) -> None:
        if step % self._every == 0:
            save(self._content(), checkpoint_id=self._folder / str(step))
            if dist.get_rank() == 0:
                shutil.rmtree(self._folder / str(step - 2 * self._every), ignore_errors=True)

    def _content(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._state["model"], self._state["optimizer"])
        return {"model": model, "optimizer": optimizer, "step": self._state["step"]}


def main() -> None:
    folder = Path(os.environ["BENCH_FOLDER"])
    way, every = os.environ["BENCH_WAY"], int(os.environ["BENCH_EVERY"])
    last = int(os.environ.get("BENCH_UNTIL", LAST_STEP))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size, pid = dist.get_rank(), dist.get_world_size(), os.getpid()
    state = fresh(float(os.environ["BENCH_MEGABYTES"]), world_size)
    kept = Distributed(state, folder / "dcp", every=every) if way == "dcp" else Memory(state, copies=way == "memory")
    began = time.monotonic()
    found = kept.restore()
    found |= {"seconds": time.monotonic() - began, "rank": rank, "world_size": world_size, "pid": pid}
    append(folder / "loads.log")(json.dumps(found))
    step_made, loss_made = append(folder / "steps.log"), append(folder / "losses.log")
    pause = float(os.environ["BENCH_PAUSE"])
    while state["step"] < last:
        loss = train(state, rank, world_size)
        state["step"] += 1
        # Before it is saved: ranks that wait there for a planned change are ended.
        loss_made(f"{state['step']} {rank} {world_size} {loss.hex()}")
        kept.save(state["step"])
        step_made(f"{time.time():.4f} {state['step']} {rank} {world_size} {pid}")
        time.sleep(pause)
    dist.destroy_process_group()


def fresh(megabytes: float, world_size: int) -> dict[str, Any]:
    """The state before the first step."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers_of(megabytes))]
    model = nn.Sequential(*(part for layer in layers for part in (nn.LayerNorm(WIDTH), layer)))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4), "step": 0}


def train(state: dict[str, Any], rank: int, world_size: int) -> float:
    """Makes a step; returns this rank's loss."""
    seed = torch.Generator().manual_seed((state["step"] * 100 + world_size) * 100 + rank)
    batch = torch.randn(BATCH, WIDTH, generator=seed)
    loss = cast("torch.Tensor", state["model"](batch)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss.item()


def append(path: Path) -> Callable[[str], object]:
    """Returns a function that adds a line to a file."""
    # Line-buffered and in append mode: a line is one write, and lines of several processes never mix.
    file = path.open("a", buffering=1, encoding="utf-8")
    return lambda line: file.write(f"{line}\n")


if __name__ == "__main__":
    main()
