"""Fixtures of the training library's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from perdure_training.checkpoint import generation
from tests.training.one_rank import World


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no name server asked, which torch would do for each connection."""
    monkeypatch.setenv("RES_OPTIONS", "attempts:0")


@pytest.fixture(autouse=True)
def closed_checkpointers() -> Iterator[None]:
    """Ends the threads of a test's checkpointers: a rank's process would end, but this one runs other tests.

    It does not wait until all is saved: tests have ranks that are stopped while they save.
    """
    begun: list[generation.GenerationCheckpoints] = []
    create = generation.GenerationCheckpoints.__init__

    def created(self: Any, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        # Played ones have no threads, and what they have mapped is to end with their world.
        if type(self) is generation.GenerationCheckpoints:
            begun.append(self)

    with mock.patch.object(generation.GenerationCheckpoints, "__init__", created):
        yield
    for one in begun:
        one.finisher._staged.put(None)
        one.storage.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path / "memory", monkeypatch)
    yield world
    world.close()
