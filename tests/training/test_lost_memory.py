"""Whatever is lost of what was saved: each rank continues with the bits of one step that all of them saved."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training.any_state import Described, fresh, made, same, values
from tests.training.ranks_in_threads import RankThreads, rank_threads

written = values.filter(lambda value: value.kind not in ("split", "meta", "quantized"))
described_states = st.dictionaries(st.sampled_from(["model", "loader"]), written, min_size=2)


def save_three_steps(ranks: RankThreads, described: dict[str, Described], size: int) -> None:
    """Saves steps 1 to 3 in memory, the first two of them in storage too."""
    found = [fresh(described, rank=rank, ranks=size) for rank in range(size)]
    assert ranks.begin(found) == [None] * size
    for step in (1, 2):
        assert ranks.save(step, states_of(described, step, size), durable=True) == [True] * size
        assert ranks.wait_until_durable(60) == [True] * size
    assert ranks.save(3, states_of(described, 3, size)) == [True] * size
    ranks.each(lambda rank: ranks.checkpointers[rank].flush())


def states_of(described: dict[str, Described], step: int, size: int) -> list[dict[str, Any]]:
    return [made(described, step, rank=rank, ranks=size) for rank in range(size)]


def damage_newest_checkpoint(ranks: RankThreads) -> None:
    file = next(ranks.storage.glob("step-2-*")) / "__0_0.distcp"
    file.write_bytes(file.read_bytes() + b"torn")


class Loss(StrEnum):
    """What is lost after steps 1 and 2 were stored, and step 3 was saved in memory."""

    NOTHING = "nothing"
    MEMORY_OF_A_RANK = "the memory of a rank"
    MEMORY = "all memory"
    NEWEST_CHECKPOINT = "all memory, and a part of the newest checkpoint"


CONTINUES_WITH = {Loss.NOTHING: 3, Loss.MEMORY_OF_A_RANK: 2, Loss.MEMORY: 2, Loss.NEWEST_CHECKPOINT: 1}


@pytest.mark.long("exactness")
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(described_states, st.integers(1, 2), st.sampled_from(Loss))
def test_ranks_continue_with_the_bits_of_a_step_that_all_of_them_saved(
    tmp_path_factory: pytest.TempPathFactory, described: dict[str, Described], size: int, loss: Loss
):
    with rank_threads(tmp_path_factory.mktemp("ranks")) as ranks:
        save_three_steps(ranks, described, size)
        if loss is Loss.MEMORY_OF_A_RANK:
            for snapshot in ranks.memory.rglob("rank-0-of-*.[0-9]"):
                snapshot.unlink()
        if loss is Loss.NEWEST_CHECKPOINT:
            damage_newest_checkpoint(ranks)
        found = [fresh(described, rank=rank, ranks=size) for rank in range(size)]
        expected = CONTINUES_WITH[loss]
        lose_memory = loss in (Loss.MEMORY, Loss.NEWEST_CHECKPOINT)
        assert ranks.begin(found, lose_memory=lose_memory) == [expected] * size
        assert same(found, states_of(described, expected, size))
