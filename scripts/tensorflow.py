"""Makes the environments of the tests with TensorFlow, each from its lock.

    python -m scripts.tensorflow lock

resolves the locks again.

One has the last release with Keras 2 and Estimator, the other today's. Like a user's image they contain nothing of
Perdure, which brings what it needs there.
"""

import hashlib
import sys
from pathlib import Path

from scripts.environments import make_environment
from scripts.setup import CACHE, ROOT, find_uv, run

LOCKS = ROOT / "tests" / "system" / "tensorflow_programs"
RELEASES = ("2.15.1", "2.21.0")
_PYTHON = "3.11"
"""The newest for which there is a 2.15."""


def interpreter(release: str) -> Path:
    """Returns the interpreter of a release's environment, and creates it if it is missing.

    Raises:
        SetupFailed: if it cannot be created.
    """
    lock = LOCKS / f"{release}.lock"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:8]
    python = sys.executable if sys.version_info[:2] == (3, 11) else _PYTHON
    home = CACHE / "tensorflow" / f"{release}-{digest}"
    return make_environment(home, ["sync", "--require-hashes", lock], size="1.5 GB", python=python)


def resolve(release: str) -> None:
    """Resolves and writes the lock of a release, with hashes and without index addresses."""
    options = ["--python-version", _PYTHON, "--generate-hashes", "--no-annotate"]
    silence = ["--no-emit-index-url", "--no-emit-find-links", "--no-header", "--quiet"]
    wanted = LOCKS / f"{release}.in"
    wanted.write_text(f"tensorflow-cpu=={release}\n", encoding="utf-8")
    try:
        command = [find_uv(), "pip", "compile", wanted, *options, *silence, "--output-file", LOCKS / f"{release}.lock"]
        run(command, remedy="Check the network.")
    finally:
        wanted.unlink()


if __name__ == "__main__":
    if sys.argv[1:] != ["lock"]:
        sys.exit(__doc__)
    for known in RELEASES:
        resolve(known)
