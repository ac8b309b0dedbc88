"""What the sharded programs add for the benchmark: they keep their state, and write down what is kept and loaded.

`steps.log` has a line for each step that a rank has kept with its copies, `time step rank world_size generation
digest`, and `loads.log` one for each rank that begins, with what it has loaded: `None` for nothing.
"""

import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from perdure_training.checkpoint import Checkpointer

PACE = float(os.environ.get("STEP_SECONDS", "0.2"))
"""Seconds of sleep per step, which simulate the compute of a larger model: a step lasts longer than its copies."""


class Keeper:
    def __init__(self, out, model, state):
        self._model, self._state, self._out = model, state, out
        self._checkpointer = Checkpointer(every=1)
        step = self._checkpointer.restore(state)
        self._write("loads.log", step)

    def keep(self, step):
        self._checkpointer.save(step, self._state)
        time.sleep(PACE)
        # Until the other node has its copy.
        self._checkpointer.flush()
        self._write("steps.log", step)

    def finish(self, step):
        whole = digest(self._model)
        if dist.get_rank() == 0:
            (self._out / "finished").write_text(f"{step} {whole}")

    def _write(self, name, step):
        generation = os.environ.get("PERDURE_GENERATION", "0")
        whole = digest(self._model)
        with (self._out / name).open("a", buffering=1) as log:
            log.write(f"{time.time():.3f} {step} {dist.get_rank()} {dist.get_world_size()} {generation} {whole}\n")


def digest(model):
    """Of the whole parameters, however they are split."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
