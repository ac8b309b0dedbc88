"""Runs tests with the oldest PyTorch release that `pyproject.toml` allows.

    python -m scripts.torch_floor

Its environment is cached by the versions of PyTorch and Python. It contains nothing else, like a user's image: Perdure
brings what it needs there.
"""

import os
import re
import subprocess
import sys
import tomllib

from scripts.environments import make_environment
from scripts.setup import CACHE, ROOT, SetupFailed

VARIABLE = "PERDURE_TORCH_FLOOR"
"""Environment variable that names the ranks' interpreter for the tests."""


def oldest_torch() -> str:
    """Returns the oldest release that the project's metadata allows, such as 2.8."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        [wanted, *_] = tomllib.load(file)["project"]["optional-dependencies"]["torch"]
    found = re.fullmatch(r"torch>=([\d.]+)", wanted)
    assert found, wanted
    return found[1]


def main() -> int:
    try:
        release = oldest_torch()
        home = CACHE / "torch-floor" / f"{release}-{sys.implementation.cache_tag}"
        python = make_environment(home, ["install", f"torch=={release}.*", "numpy"], size="7 GB")
    except SetupFailed as failed:
        print(f"setup: {failed}", file=sys.stderr)
        return 1
    tests = [sys.executable, "-m", "pytest", "tests/launcher/test_torch_floor.py", *sys.argv[1:]]
    return subprocess.run(tests, cwd=ROOT, env={**os.environ, VARIABLE: str(python)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
