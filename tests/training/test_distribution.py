"""The training library where ranks and laptops find it: injected by the launcher, and as a wheel of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perdure_launcher.environment import inject
from tests.support.allocation import REPOSITORY
from tests.support.wheels import built_wheel

ALONE = "import perdure_training, sys; print(perdure_training.__file__); assert 'perdure' not in sys.modules"


def imported_from(*path: Path) -> Path:
    """Where a Python with nothing installed finds the library on this import path."""
    program = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}; {ALONE}"
    answer = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    return Path(answer.stdout.strip())


def test_ranks_import_the_launchers_library_before_another_that_the_image_has(tmp_path: Path):
    image = tmp_path / "site-packages"
    (image / "perdure_training").mkdir(parents=True)
    (image / "perdure_training" / "__init__.py").write_text("from perdure_training.newer import gone\n")
    injected = inject(tmp_path / "run")
    assert imported_from(injected, image).is_relative_to(injected)


def test_the_wheel_needs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Without it, uv finds the name server again, if it needs one.
    monkeypatch.delenv("RES_OPTIONS")
    wheel = built_wheel(REPOSITORY / "deploy/perdure-training", tmp_path)
    assert imported_from(wheel).is_relative_to(wheel)
