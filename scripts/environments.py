"""Makes environments of other packages than the checkout's: cached outside of it, and shared by all checkouts.

One is created atomically: an interrupted creation begins again, and of several at once one creates it.
"""

import fcntl
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.setup import find_uv, run, step


def make_environment(home: Path, install: Sequence[str | Path], *, size: str, python: str = sys.executable) -> Path:
    """Creates an environment if it is missing.

    Args:
        home: Its folder.
        install: The command of `uv pip` that fills it, such as `install torch`.
        size: What it takes, such as 7 GB.
        python: Its interpreter, or the version of one that is on the machine.

    Returns:
        The environment's interpreter.

    Raises:
        SetupFailed: if it cannot be created.
    """
    interpreter = home / "bin" / "python"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_name(f"{home.name}.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if interpreter.exists():
            return interpreter
        uv = find_uv()
        with (
            step(f"installing {home.parent.name} {home.name} into {home} (once, {size}: minutes)"),
            tempfile.TemporaryDirectory(dir=home.parent) as folder,
        ):
            made = Path(folder) / "environment"
            run([uv, "venv", "--quiet", "--python", python, made], remedy=f"Install Python {python}.")
            # Compiled now: otherwise every process that imports the packages compiles them again.
            options = ["--quiet", "--compile-bytecode", "--python", made / "bin" / "python"]
            command, *words = install
            run([uv, "pip", command, *options, *words], remedy=f"Check the network and the free disk space ({size}).")
            made.rename(home)
    return interpreter
