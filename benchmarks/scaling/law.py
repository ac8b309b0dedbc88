"""A training without torch whose step follows a law: its nodes share `--compute` seconds, and each adds
`--exchange` seconds.

It goes on with the step that it had, and writes a line for each step of its first rank.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

from perdure_training import report

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--compute", type=float, required=True)
parser.add_argument("--exchange", type=float, required=True)
parser.add_argument("--noise", type=float, default=0.1)
parser.add_argument("--steps", type=int, required=True)
options = parser.parse_args()
rank, world_size, generation = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "PERDURE_GENERATION"))
last = options.out / "last"
step = int(last.read_text()) if last.exists() else 0
with (options.out / "steps").open("a", buffering=1) as log:
    # All ranks of a world take the same time for a step, as if they exchanged something.
    source = random.Random(f"{generation}")
    end = time.time()
    while step < options.steps:
        law = options.compute / world_size + options.exchange * world_size
        end = max(end + law * max(source.gauss(1, options.noise), 0.1), time.time())
        time.sleep(max(end - time.time(), 0))
        step += 1
        report(step=step, total=options.steps)
        if rank == 0:
            log.write(f"{time.time():.3f} {step} {world_size} {generation}\n")
            partial = last.with_suffix(".partial")
            partial.write_text(str(step))
            partial.replace(last)
