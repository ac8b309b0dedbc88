"""Fixtures of the tests that need a GPU of NVIDIA's: `make test-gpu`. Other runs do not collect this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.conftest import site
from tests.training.one_rank import World

__all__ = ["figures", "gpu", "site", "world"]


@pytest.fixture(scope="session", autouse=True)
def gpu() -> str:
    """The product name of the GPU; the run ends where there is none, since no test of it would show anything."""
    if not torch.cuda.is_available():
        pytest.exit("make test-gpu: torch finds no GPU of NVIDIA's on this machine", returncode=1)
    return torch.cuda.get_device_name(0)


@pytest.fixture
def figures(gpu: str, capsys: pytest.CaptureFixture[str]) -> Iterator[dict[str, Any]]:
    """Figures that a test measures, by name. They are printed when it ends, and judged by no test."""
    found: dict[str, Any] = {}
    yield found
    with capsys.disabled():
        print()
        for name, value in found.items():
            print(f"on one {gpu}: {name}: {value}")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world of one rank whose memory folder is memory, as on a node."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield World(Path(folder), monkeypatch)
