"""What a script that saves by itself finds at its next start, by what died: as the table of the guide says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from perdure.agent.checkpoint import peer_copies
from scripts.losses import LOSSES, Died, Kind, Loss, name_of
from tests.agent.test_agent_copies import Nodes, save, saved

ON_ITS_NODE = (Died.RANK, Died.SHRINKS, Died.GROWS)
"""What ends the command, and leaves its node."""
TOGETHER = (Died.NEIGHBOURS, Died.ALL, Died.SUSPENDED)
"""What ends the node that keeps the copies, too."""

CELLS = [
    pytest.param(died, stored, id=name_of(died, Kind.WATCHED, stored=stored))
    for died in Died
    if died is not Died.CONTROL
    for stored in (False, True)
]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack, tmp_path)


@pytest.mark.parametrize(("died", "stored"), CELLS)
def test_a_watched_folder_loses_what_the_guide_says(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: Died, stored: bool
):
    monkeypatch.setattr(peer_copies, "WAITS_FOR_TARGET", 1.0)
    storage = str(tmp_path / "storage") if stored else None
    keeping, node = nodes.start(0, storage=storage), nodes.start(1, storage=storage)
    folder = tmp_path / "saves"
    if not stored:
        node.hold_copies(keeping)
    save(node, folder, 1, 2)
    if died not in ON_ITS_NODE:
        node.checkpoints.close()
        folder = tmp_path / "other"
        if died in TOGETHER:
            keeping.checkpoints.close()
            keeping = nodes.start(0, incarnation=2, storage=storage)
        node = nodes.start(1, incarnation=2, storage=storage)
        if not stored:
            node.hold_copies(keeping)
    cell = LOSSES[died][Kind.WATCHED]
    newest = {Loss.SAVE: ["step-2.pt"], Loss.ALL: []}[cell.stored if stored else cell.without]
    assert saved(node, folder)[-1:] == newest
