"""What a state in memory loses, by what died: as the table of the guide says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from perdure_training.checkpoint import MemoryWriter
from perdure_training.checkpoint.planned_state import OfAnotherWorld
from scripts.losses import LOSSES, Died, Kind, Loss, name_of
from tests.training.played_nodes import PlayedNode
from tests.training.played_worlds import PlayedRank, PlayedSite, Saved, played_site, weight

NODES = 3


class DcpRank(PlayedRank):
    """A rank whose script saves with `torch.distributed.checkpoint`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, storage=False)

    waits = False
    """Whether only a world of another size can load what is there."""

    def restore(self) -> None:
        try:
            self.writer = MemoryWriter(self.checkpointer)
        except OfAnotherWorld:
            self.waits = True
            return
        self.loaded = self.writer.step
        if self.loaded is not None:
            content = {"weight": torch.zeros(2), "part": torch.zeros(1)}
            load(content, storage_reader=self.writer.reader(), no_dist=True)
            assert int(content["part"]) == self.own.rank
            step, made_in = map(int, content["weight"].tolist())
            self.state["saved"] = Saved(step, made_in)

    def step(self) -> bool:
        saved = Saved(self.at + 1, self.own.generation)
        self.state["saved"] = saved
        content = {"weight": weight(saved), "part": torch.tensor([float(self.own.rank)])}
        save(content, storage_writer=self.writer, checkpoint_id=f"step-{saved.step}", no_dist=True)
        return True


KEPT: dict[Kind, dict[str, dict[str, Any]]] = {
    Kind.REPLICATED: {"state": {"replicated": True, "copies": 0}},
    Kind.SPLIT: {"state": {"replicated": False, "copies": 1}},
    Kind.SEVERAL: {"model": {"replicated": False, "copies": 1}, "average": {"replicated": True, "copies": 0}},
    Kind.DCP: {"dcp": {"replicated": False, "copies": 1, "rank_type": DcpRank}},
}
"""The checkpointers of each kind, by name."""


class Training:
    """A training on played nodes, whose checkpointers save every step."""

    def __init__(self, site: PlayedSite, kind: Kind) -> None:
        self.site = site
        self._kept = KEPT[kind]
        self.ranks: dict[str, Sequence[PlayedRank]] = {}
        self.begin([site.node() for _ in range(NODES)])

    def begin(self, nodes: Sequence[PlayedNode]) -> None:
        """Has the ranks of the next world restore."""
        self.nodes = list(nodes)
        for number, (name, options) in enumerate(self._kept.items()):
            world = self.site.begin(nodes, ranks_of_node=1, name=name, again=number > 0, **options)
            self.ranks[name] = world.ranks

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for ranks in self.ranks.values():
                for rank in ranks:
                    rank.step()
                for rank in ranks:
                    rank.finish()

    def store(self) -> None:
        """As a job with a storage does."""
        for name, ranks in self.ranks.items():
            self.site.stored[name] = ranks[0].state["saved"]

    @property
    def at(self) -> dict[str, int]:
        """The step of each checkpointer."""
        return {name: ranks[0].at for name, ranks in self.ranks.items()}

    def suspended(self) -> list[PlayedNode]:
        """Ends all nodes, with ranks that wait at a step which is stored; returns those of the next world."""
        if self.site.stored:
            self.store()
        return self.replaced(0, 1, 2)

    def lose(self, *numbers: int, leaves_folder: bool = False) -> list[PlayedNode]:
        """Ends nodes; returns what the next world has of the others."""
        for number in numbers:
            self.site.lose(self.nodes[number], leaves_folder=leaves_folder)
        return [node for node in self.nodes if not node.is_lost]

    def replaced(self, *numbers: int, leaves_folder: bool = False) -> list[PlayedNode]:
        """Ends nodes; returns all nodes of the next world, with new ones in their places."""
        self.lose(*numbers, leaves_folder=leaves_folder)
        return [
            self.site.node(left=self.site.left.pop() if leaves_folder else None) if node.is_lost else node
            for node in self.nodes
        ]


DIES: dict[Died, Callable[[Training], list[PlayedNode]]] = {
    Died.RANK: lambda training: training.nodes,
    Died.LAUNCHER: lambda training: training.replaced(1, leaves_folder=True),
    Died.NODE: lambda training: training.replaced(1),
    Died.SHRINKS: lambda training: training.lose(1),
    Died.GROWS: lambda training: [*training.nodes, training.site.node()],
    Died.NEIGHBOURS: lambda training: training.replaced(0, 1),
    Died.ALL: lambda training: training.replaced(0, 1, 2),
    Died.SUSPENDED: lambda training: training.suspended(),
}
"""What happens, by what the table says; the nodes of the next world."""

CELLS = [
    pytest.param(died, kind, stored, id=name_of(died, kind, stored=stored))
    for died in DIES
    for kind in KEPT
    for stored in (False, True)
]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PlayedSite]:
    with played_site(tmp_path) as site:
        yield site


@pytest.mark.parametrize(("died", "kind", "stored"), CELLS)
def test_a_state_loses_what_the_guide_says(site: PlayedSite, died: Died, kind: Kind, stored: bool):
    training = Training(site, kind)
    training.train(3)
    if stored:
        training.store()
    training.train(2)
    made, durable = training.at, {name: saved.step for name, saved in site.stored.items()}
    training.begin(DIES[died](training))
    if (LOSSES[died][kind].stored if stored else LOSSES[died][kind].without) is Loss.WAITS:
        assert all(rank.waits for ranks in training.ranks.values() for rank in ranks if isinstance(rank, DcpRank))
        left = training.nodes[:NODES]
        training.begin([*left, *(site.node() for _ in range(NODES - len(left)))])
    expected: dict[str, int | None] = {}
    for name, ranks in training.ranks.items():
        assert len({rank.at for rank in ranks}) == 1
        own = Kind.REPLICATED if KEPT[kind][name]["replicated"] else kind if kind is Kind.DCP else Kind.SPLIT
        cell = LOSSES[died][own]
        loss = cell.stored if stored else cell.without
        steps = {Loss.NOTHING: made[name], Loss.WAITS: made[name], Loss.ALL: 0, Loss.CHECKPOINT: durable.get(name)}
        expected[name] = steps[loss]
    if stored and None not in expected.values():
        # One that has the step of the other follows it.
        expected = dict.fromkeys(expected, min(step for step in expected.values() if step is not None))
    assert training.at == expected


@pytest.mark.parametrize("died", DIES, ids=lambda died: died.name.lower())
def test_of_several_checkpointers_the_table_says_what_loses_most(died: Died):
    cells = LOSSES[died]
    worst = (
        cells[Kind.SPLIT] if cells[Kind.REPLICATED] == LOSSES[Died.RANK][Kind.REPLICATED] else cells[Kind.REPLICATED]
    )
    assert cells[Kind.SEVERAL] == worst
