"""Runs another training script unchanged, and has one of its ranks fail at a chosen step, or all of them pause as a
healthy training does.

    torchrun injected.py SCRIPT ARGUMENTS

The script knows nothing of it: the fault happens in a hook of its optimizer. A benchmark writes the file `fault` into
`FAULTS_FOLDER`, and finds there the steps of each rank and the time of the fault. Steps are those that the optimizer
itself has counted, which its checkpoints keep.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import re
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

FOLDER = Path(os.environ["FAULTS_FOLDER"])
RANK = int(os.environ["RANK"])
GENERATION = int(os.environ.get("PERDURE_GENERATION", "0"))


def exit_with_1() -> None:
    sys.exit(1)


def raise_an_error() -> None:
    raise ValueError("this batch cannot be read")


def segfault() -> None:
    ctypes.string_at(0)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exceed_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
    torch.empty(2**36, dtype=torch.uint8)


def loop() -> None:
    while True:
        pass


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def block_the_interpreter() -> None:
    """Waits in C for a lock that it holds, and keeps the interpreter's lock meanwhile: no other thread of the rank
    runs."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def block_the_interpreter_in_a_thread() -> None:
    """A thread matches an expression that takes exponential time, which keeps the interpreter's lock."""
    threading.Thread(target=re.match, args=("(a+)+$", "a" * 64 + "b"), daemon=True).start()
    time.sleep(0.1)


class _Stuck(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        wait_for_a_lock()
        return index


def load_from_a_stuck_worker() -> None:
    next(iter(torch.utils.data.DataLoader(_Stuck(), num_workers=1)))


def enter_one_more_collective() -> None:
    dist.barrier()


def bring_another_size() -> None:
    dist.all_reduce(torch.zeros(1000))


IN_RANK: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        exit_with_1,
        raise_an_error,
        segfault,
        kill_itself,
        exceed_memory,
        loop,
        wait_for_a_lock,
        block_the_interpreter,
        block_the_interpreter_in_a_thread,
        load_from_a_stuck_worker,
        enter_one_more_collective,
        bring_another_size,
    )
}


def spoil(optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> None:
    """Makes the first gradient no number."""
    gradient = optimizer.param_groups[0]["params"][0].grad
    gradient.view(-1)[0] = math.nan


def flip(optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> None:
    """Flips one bit of the first gradient."""
    gradient = optimizer.param_groups[0]["params"][0].grad
    gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << arguments["bit"])


class Injector:
    """Watches for the fault of this rank, and for the pauses of a healthy training."""

    def __init__(self) -> None:
        self._steps = (FOLDER / f"steps-{RANK}").open("a", buffering=1)
        (FOLDER / f"pid-{RANK}").write_text(f"{os.getpid()}")
        self._slow = 0.0
        """Seconds by which each step takes longer from now on."""
        self._profile: dict[str, Any] = json.loads(os.environ.get("FAULTS_PROFILE", "{}"))

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if fault := self._due(step_of(optimizer) + 1):
            self._begin(fault, optimizer)

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = step_of(optimizer)
        self._steps.write(f"{time.time():.3f} {step} {GENERATION}\n")
        pause(self._profile, step)
        # Before the next collective, where a slow rank computes.
        time.sleep(self._slow)

    def _due(self, step: int) -> dict[str, Any] | None:
        try:
            fault = json.loads((FOLDER / "fault").read_text())
        except FileNotFoundError:
            return None
        mine = fault["rank"] == RANK if not fault.get("others") else fault["rank"] != RANK
        if not mine or step < fault["step"]:
            return None
        try:
            with (FOLDER / f"hit-{RANK}").open("x") as file:
                file.write(f"{time.time()} {os.getpid()}")
        except FileExistsError:
            return fault if fault.get("each_time") else None
        return fault

    def _begin(self, fault: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        match fault["kind"]:
            case "slow":
                self._slow = fault["seconds"]
            case "spoil":
                spoil(optimizer, fault)
            case "flip":
                flip(optimizer, fault)
            case kind:
                IN_RANK[kind]()


def step_of(optimizer: torch.optim.Optimizer) -> int:
    """The steps that an optimizer like Adam has made, those before it was loaded included."""
    for state in optimizer.state.values():
        return int(state["step"])
    return 0


def evaluate(seconds: float) -> None:
    time.sleep(seconds)


def ask_for_scores(seconds: float) -> None:
    """Waits for another machine: neither its name nor anything else tells it from a rank that sleeps forever."""
    time.sleep(seconds)


def save_checkpoint(seconds: float) -> None:
    time.sleep(seconds)


def compile_graph(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def pause(profile: dict[str, Any], step: int) -> None:
    """Pauses as a healthy training does at some steps."""
    scale = profile.get("scale", 0.0)
    match profile.get("kind"):
        case "warm-up" if step <= 30:
            time.sleep(0.3)
        case "evaluation-on-all" if step % 80 == 0:
            evaluate(180 * scale)
        case "evaluation-on-one" if step % 80 == 0 and RANK == 0:
            evaluate(180 * scale)
        case "bursty-input":
            if random.random() < 0.1:
                time.sleep(0.5)
        case "compilation" if step == 60:
            compile_graph(90 * scale)
        case "silent-work-on-one" if step % 80 == 0 and RANK == 0:
            ask_for_scores(180 * scale)
        case "long-saves" if step % 60 == 0 and RANK == 0:
            save_checkpoint(100 * scale)
        case "gradual-slow-down":
            time.sleep(min(0.002 * step, 0.5))
        case "long-sequences" if step > 80:
            time.sleep(0.6)
        case "end-of-epoch" if step == 100:
            time.sleep(110 * scale)
        case _:
            pass


if __name__ == "__main__":
    injector = Injector()
    register_optimizer_step_pre_hook(injector.before)
    register_optimizer_step_post_hook(injector.after)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
