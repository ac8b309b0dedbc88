"""A world of one rank, without a launcher: generations one after another in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from perdure_training.checkpoint import Checkpointer


class World:
    """The environment of one rank, in one generation after another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._set = monkeypatch.setenv
        self._generation = 0
        self._store: TCPStore | None = None
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            self._set(name, value)
        self._set("PERDURE_MEMORY_DIR", str(folder))
        self._set("PERDURE_RUN_ID", "run")
        self._set("TORCHELASTIC_RUN_ID", "run")
        self._set("PERDURE_STORE", "127.0.0.1:1")

    def next_generation(self) -> None:
        """Begins the next generation, with a store of its own."""
        self._generation += 1
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._set("PERDURE_STORE", f"127.0.0.1:{self._store.port}")
        self._set("PERDURE_GENERATION", str(self._generation))

    def begin(self, state: dict[str, Any], **arguments: Any) -> tuple[Checkpointer, int | None]:
        """Begins the next generation, and restores."""
        self.next_generation()
        checkpointer = Checkpointer(**dict[str, Any](every=1) | arguments)
        return checkpointer, checkpointer.restore(state)

    def close(self) -> None:
        """Ends the last generation's store."""
        self._store = None

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("rank-*.[0-9]"))
