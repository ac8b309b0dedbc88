"""The job of `benchmarks.recovery`, with a rank that allocates more and more memory on request.

The request is a file `allocate-<rank>` in the results folder. The rank deletes it before it allocates memory, so that
its successor does not do the same.
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
    """Waits for the request, then allocates memory until the kernel ends the process."""
    while True:
        with suppress(FileNotFoundError):
            word.unlink()
            break
        time.sleep(0.05)
    held: list[bytes] = []
    while True:
        # The pages are written, because untouched pages use no memory.
        held.append(b"x" * CHUNK)


if __name__ == "__main__":
    told = Path(os.environ["BENCH_FOLDER"], f"allocate-{os.environ['RANK']}")
    threading.Thread(target=allocate_when_told, args=(told,), daemon=True).start()
    runpy.run_path(str(Path(__file__).parents[1] / "recovery" / "train.py"), run_name="__main__")
