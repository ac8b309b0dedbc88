"""Runs tests with the oldest PyTorch release that `pyproject.toml` allows.

    python -m scripts.torch_floor

Its environment is cached outside of the checkout by the versions of PyTorch and Python, and is created atomically: an
interrupted one is created again. It contains nothing else, like a user's image: Perdure brings what it needs there.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from scripts.setup import CACHE, ROOT, SetupFailed, find_uv, run, step

VARIABLE = "PERDURE_TORCH_FLOOR"
"""Environment variable that names the ranks' interpreter for the tests."""


def oldest_torch() -> str:
    """Returns the oldest release that the project's metadata allows, such as 2.8."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        [wanted, *_] = tomllib.load(file)["project"]["optional-dependencies"]["torch"]
    found = re.fullmatch(r"torch>=([\d.]+)", wanted)
    assert found, wanted
    return found[1]


def make_environment(release: str) -> Path:
    """Creates the environment if it is missing.

    Returns:
        The environment's interpreter.

    Raises:
        SetupFailed: if it cannot be created.
    """
    home = CACHE / "torch-floor" / f"{release}-{sys.implementation.cache_tag}"
    python = home / "bin" / "python"
    if python.exists():
        return python
    uv = find_uv()
    home.parent.mkdir(parents=True, exist_ok=True)
    with (
        step(f"installing torch {release} into {home} (once, 7 GB: minutes)"),
        tempfile.TemporaryDirectory(dir=home.parent) as folder,
    ):
        made = Path(folder) / "environment"
        run([uv, "venv", "--quiet", "--python", sys.executable, made], remedy="Check the free disk space.")
        # Compiled now: otherwise every rank that imports torch compiles it again.
        install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", made / "bin" / "python"]
        run([*install, f"torch=={release}.*", "numpy"], remedy="Check the network and the free disk space (7 GB).")
        made.rename(home)
    return python


def main() -> int:
    try:
        python = make_environment(oldest_torch())
    except SetupFailed as failed:
        print(f"setup: {failed}", file=sys.stderr)
        return 1
    tests = [sys.executable, "-m", "pytest", "tests/launcher/test_torch_floor.py", *sys.argv[1:]]
    return subprocess.run(tests, cwd=ROOT, env={**os.environ, VARIABLE: str(python)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
