"""The job of `benchmarks.recovery`, with a rank that takes more and more memory once it is told to.

The word is a file `allocate-<rank>` in the folder of the results. It is gone before the memory is taken, so that the
rank's successor does not do the same.
"""

from __future__ import annotations

import os
import runpy
import threading
import time
from contextlib import suppress
from pathlib import Path

CHUNK = 64 * 2**20


def allocate_when_told(word: Path) -> None:
    """Takes memory until the kernel says no."""
    while True:
        with suppress(FileNotFoundError):
            word.unlink()
            break
        time.sleep(0.05)
    held: list[bytes] = []
    while True:
        # Written to: untouched pages take no memory.
        held.append(b"x" * CHUNK)


if __name__ == "__main__":
    told = Path(os.environ["BENCH_FOLDER"], f"allocate-{os.environ['RANK']}")
    threading.Thread(target=allocate_when_told, args=(told,), daemon=True).start()
    runpy.run_path(str(Path(__file__).parents[1] / "recovery" / "train.py"), run_name="__main__")
