"""A snapshot as memory of the process that restores it: nothing is copied at first, nothing is shared in the end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from perdure_training.snapshots import private_map
from perdure_training.snapshots.private_map import PrivateMap
from tests.training.one_rank import World
from tests.training.test_checkpointer import save

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 8 * MIB)
    return path


def copied_kilobytes(path: Path) -> int:
    """The memory of this process in mappings of a file that is its own."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and name == "Anonymous:":
            found += int(rest[0])
    return found


@pytest.mark.parametrize("on_request", [True, False])
def test_what_is_written_stays_apart_from_the_file(file: Path, monkeypatch: pytest.MonkeyPatch, on_request: bool):
    if not on_request:
        # A kernel before 5.14.
        monkeypatch.setattr(private_map, "_copies_on_request", lambda: False)
    memory = PrivateMap(file)
    piece = memory.piece(100, 2 * MIB)
    piece[0:1] = b"b"
    assert file.read_bytes() == b"a" * 8 * MIB
    memory.detach()
    with file.open("r+b") as open_file:
        open_file.write(b"c" * 8 * MIB)
    assert bytes(piece) == b"b" + b"a" * (2 * MIB - 1)


def test_only_what_is_in_use_is_copied(file: Path):
    memory = PrivateMap(file)
    kept, dropped = memory.piece(0, MIB), memory.piece(4 * MIB, 2 * MIB)
    assert (bytes(kept[:1]), bytes(dropped[:1])) == (b"a", b"a")
    tensor = torch.frombuffer(kept, dtype=torch.uint8)
    del kept, dropped
    assert copied_kilobytes(file) == 0
    memory.detach()
    assert copied_kilobytes(file) == 1024
    assert int(tensor.sum()) == ord("a") * MIB


def test_a_thread_may_write_while_pages_are_copied(file: Path):
    memory = PrivateMap(file)
    tensor = torch.frombuffer(memory.piece(0, 8 * MIB), dtype=torch.uint8)
    begun = threading.Event()

    def add() -> None:
        for _ in range(20):
            tensor.add_(1)
            begun.set()

    writing = threading.Thread(target=add)
    writing.start()
    begun.wait(10)
    memory.detach()
    writing.join(60)
    assert bool((tensor == ord("a") + 20).all())


def test_a_restored_snapshot_is_not_overwritten_while_the_state_still_reads_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    class Keeper:
        """Keeps what it is given, as optimizers do."""

        def __init__(self) -> None:
            self.kept = torch.full((3 * MIB,), 7, dtype=torch.uint8)

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"kept": self.kept}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.kept = state["kept"]

    checkpointer, _ = world.begin({"keeper": Keeper()})
    save(checkpointer, 1, {"keeper": Keeper()})
    copied, may_copy = threading.Event(), threading.Event()
    detach = PrivateMap.detach

    def later(self: PrivateMap) -> None:
        may_copy.wait(60)
        detach(self)
        copied.set()

    monkeypatch.setattr(PrivateMap, "detach", later)
    restored = Keeper()
    restored.kept.zero_()
    checkpointer, step = world.begin({"keeper": restored})
    assert step == 1
    others = {"keeper": Keeper()}
    others["keeper"].kept.fill_(9)
    for step in range(2, 6):
        checkpointer.save(step, others)
        checkpointer.flush()
    assert bool((restored.kept == 7).all())
    may_copy.set()
    assert copied.wait(60)
    for step in range(6, 10):
        checkpointer.save(step, others)
        checkpointer.flush()
    assert bool((restored.kept == 7).all())
    assert len(list((world.folder / "stage-0" / "state").glob("rank-0-of-*.[0-9]"))) == 3
