"""One of two ranks: saves and restores the same state in several ways, and prints what each took as lines of JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from perdure_training.checkpoint import Checkpointer

WIDTH = 4096
BYTES_PER_PARAMETER = 12
"""Parameter, and the two moments of AdamW, in 32 bits."""
SLOTS = 4
"""A rank's first snapshots, each of which takes memory of its own."""
STEP_SECONDS = 0.4
"""Time of a step of the overhead's measurement: the model itself would take several seconds on two cores."""


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


class Measurement:
    """The state, and the time that each way takes with it."""

    def __init__(self, folder: Path, *, gigabytes: float, saves: int = 0, steps: int = 0, trained: bool = True) -> None:
        layers = max(1, round(gigabytes * 1e9 / BYTES_PER_PARAMETER / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if trained:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.size = layers * WIDTH**2 * BYTES_PER_PARAMETER
        self.folder = folder
        self.saves = saves
        self.steps_in_turn = steps
        self._stores: list[TCPStore | None] = []

    def run(self) -> None:
        self.report("size", self.size)
        self.save_beside_memcpy()
        self.store_durably()
        self.alone("torch.save", lambda step: torch.save(self.dictionaries(), self.folder / "saved.pt"))
        self.times("dcp.save", lambda step: state_dict_saver.save(self.dictionaries(), checkpoint_id=self.fresh("dcp")))
        for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
            self.asynchronous(kind)
        self.overhead()

    def store_durably(self) -> None:
        """Saves into storage through an agent, and waits until each checkpoint is committed."""
        self.forget_memory()
        os.environ["PERDURE_PROGRESS_DIR"] = os.environ["BENCH_AGENT"]
        checkpointer = self.checkpointer(every=1)
        self.times(
            "perdure, durable",
            lambda step: checkpointer.save(step, self.state, durable=True),
            after=lambda: checkpointer.wait_until_durable(600),
            allocating=SLOTS,
        )
        checkpointer.close()
        del os.environ["PERDURE_PROGRESS_DIR"]
        self.forget_memory()

    def dictionaries(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.state.items()}

    def save_beside_memcpy(self) -> None:
        """Saves in memory, each time right after a memcpy of as many bytes: memory is not always equally fast."""
        # Both are written: all pages of an untouched source would be one page of zeros, which the cache keeps.
        source, target = (torch.full((self.size,), value, dtype=torch.uint8) for value in (1, 2))
        checkpointer = self.checkpointer(every=1)
        copies: list[float] = []

        def copy() -> None:
            dist.barrier()
            copies.append(seconds(lambda: target.copy_(source)))

        self.times("perdure", partial(self.save, checkpointer), before=copy, after=checkpointer.flush, allocating=SLOTS)
        checkpointer.close()
        copied = statistics.median(copies[SLOTS:])
        self.report("memcpy", {"stall": copied, "finished": copied})

    def times(
        self,
        name: str,
        save: Callable[[int], object],
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
        allocating: int = 1,
    ) -> None:
        """Reports the stall of each save, and the time until it is finished; without the first ones, which also
        allocate memory."""
        stalls: list[float] = []
        finished: list[float] = []
        for step in range(1, self.saves + allocating + 1):
            before()
            dist.barrier()
            stall = seconds(lambda step=step: save(step))
            rest = seconds(after)
            if step > allocating:
                stalls.append(stall)
                finished.append(stall + rest)
        self.report(name, {"stall": statistics.median(stalls), "finished": statistics.median(finished)})

    def alone(self, name: str, save: Callable[[int], object]) -> None:
        """Measures like `times`, with rank 0 alone saving, as is usual for a replicated state."""
        self.times(name, lambda step: save(step) if dist.get_rank() == 0 else None)

    def asynchronous(self, kind: AsyncCheckpointerType) -> None:
        futures: list[Any] = []

        def save(step: int) -> None:
            futures.append(
                state_dict_saver.async_save(
                    self.dictionaries(), checkpoint_id=self.fresh("async"), async_checkpointer_type=kind
                )
            )

        self.times(f"dcp.async_save ({kind.value})", save, after=lambda: futures.pop().result())

    def load_from_disk(self) -> None:
        loaded = torch.load(self.folder / "saved.pt", weights_only=True)
        for name, value in self.state.items():
            value.load_state_dict(loaded[name])

    def forget_memory(self) -> None:
        """Deletes all snapshots, for which there is not room several times."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(os.environ["PERDURE_MEMORY_DIR"]) / "stage-0")
        dist.barrier()

    def overhead(self) -> None:
        """Steps with and without snapshots, in turn."""
        for every in (1, "auto"):
            checkpointer = self.checkpointer(every=every, name=f"overhead-{every}")
            step = 0
            if every == "auto":
                # Until the number of steps is chosen, each is saved.
                for step in range(1, 12):
                    work(STEP_SECONDS)
                    checkpointer.save(step, self.state)
            with_snapshots, without = 0.0, 0.0
            for _ in range(3):
                without += self.steps(lambda _: None, first=0)
                with_snapshots += self.steps(partial(self.save, checkpointer), first=step)
                step += self.steps_in_turn
            self.report(f"overhead {every}", 100 * (with_snapshots / without - 1))
            checkpointer.close()
            self.forget_memory()

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        checkpointer.save(step, self.state)

    def steps(self, save: Callable[[int], object], *, first: int) -> float:
        dist.barrier()

        def run() -> None:
            for step in range(first + 1, first + self.steps_in_turn + 1):
                work(STEP_SECONDS)
                save(step)

        return seconds(run)

    def checkpointer(self, *, every: Any, name: str = "state") -> Checkpointer:
        """A checkpointer of a new generation, which has a store of its own; it has restored what there is."""
        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
        port: list[Any] = [host.port if host else None]
        dist.broadcast_object_list(port)
        os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
        self._stores.append(host)
        made = Checkpointer(every=every, replicated=True, name=name)
        made.restore(self.state)
        return made

    def fresh(self, name: str) -> Path:
        """A folder that does not exist yet, on all ranks the same."""
        folder = self.folder / name
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        return folder

    def report(self, what: str, value: object) -> None:
        if dist.get_rank() == 0:
            print(json.dumps({"what": what, "value": value}), flush=True)


def work(duration: float) -> None:
    """Computes for as long as a step takes."""
    until = time.perf_counter() + duration
    one = torch.ones(256, 256)
    while time.perf_counter() < until:
        torch.mm(one, one)


def run_as_rank(kind: type[Measurement]) -> None:
    """Makes a measurement as the rank that a launcher started this process as."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"]
    kind(options.folder, gigabytes=options.gigabytes, saves=options.saves, steps=options.steps).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_as_rank(Measurement)
