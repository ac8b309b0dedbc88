"""A training without torch, for tests of its surroundings: a report and a line for every step, and a checkpoint."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from perdure_training import report

out, *rest = sys.argv[1:]
fail_at = int(rest[rest.index("--fail-at") + 1]) if "--fail-at" in rest else 0
folder = Path(out)
rank, world_size, generation = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "PERDURE_GENERATION"))
checkpoint = folder / "checkpoint"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
with (folder / "steps").open("a", buffering=1) as log:
    while not (folder / "finish").exists():
        step += 1
        report(step=step)
        log.write(f"{time.time():.3f} {step} {rank} {world_size} {generation} {os.getpid()}\n")
        if step == fail_at:
            sys.exit(f"failing at step {step} as told")
        if rank == 0 and step % 10 == 0:
            partial = checkpoint.with_suffix(".partial")
            partial.write_text(str(step))
            partial.replace(checkpoint)
        time.sleep(0.02)
