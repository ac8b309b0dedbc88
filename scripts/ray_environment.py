"""Makes the environment of the tests with Ray, from its lock.

    python -m scripts.ray_environment lock

resolves the lock again.

Like the machines of a Ray cluster, it contains nothing of Perdure; nodes are given the interpreter that does.
"""

import hashlib
import sys
from pathlib import Path

from scripts.environments import make_environment
from scripts.setup import CACHE, ROOT, find_uv, run

LOCK = ROOT / "tests" / "system" / "ray_programs" / "requirements.lock"
RELEASE = "2.60.0"
_PYTHON = "3.11"
_BUILDS = ("pip", "virtualenv", "grpcio")
"""With these Ray builds environments with the packages of a job."""


def interpreter() -> Path:
    """Returns the environment's interpreter, and creates the environment if it is missing.

    Raises:
        SetupFailed: if it cannot be created.
    """
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:8]
    python = sys.executable if sys.version_info[:2] == (3, 11) else _PYTHON
    home = CACHE / "ray" / f"{RELEASE}-{digest}"
    return make_environment(home, ["sync", "--require-hashes", LOCK], size="0.3 GB", python=python)


def resolve() -> None:
    """Resolves and writes the lock, with hashes and without index addresses."""
    options = ["--python-version", _PYTHON, "--generate-hashes", "--no-annotate"]
    silence = ["--no-emit-index-url", "--no-emit-find-links", "--no-header", "--quiet"]
    wanted = LOCK.with_suffix(".in")
    wanted.write_text("\n".join((f"ray=={RELEASE}", *_BUILDS, "")), encoding="utf-8")
    try:
        command = [find_uv(), "pip", "compile", wanted, *options, *silence, "--output-file", LOCK]
        run(command, remedy="Check the network.")
    finally:
        wanted.unlink()


if __name__ == "__main__":
    if sys.argv[1:] != ["lock"]:
        sys.exit(__doc__)
    resolve()
