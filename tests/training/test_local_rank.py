"""Tests of which rank of its node a rank is, whatever LOCAL_RANK says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from perdure_training.node_api.local_rank import local_rank_of
from tests.training.ranks_in_threads import rank_threads


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        ({"LOCAL_RANK": "3"}, 3),
        ({}, 0),
        # torchrun's --virtual-local-rank.
        ({"LOCAL_RANK": "0", "RANK": "5", "PERDURE_FIRST_RANK": "4"}, 1),
        # A torchrun that a rank has started for purposes of its own.
        ({"LOCAL_RANK": "1", "RANK": "1", "PERDURE_FIRST_RANK": "4"}, 1),
    ],
)
def test_a_rank_is_counted_from_the_first_one_of_its_node(environment: Mapping[str, str], local_rank: int):
    assert local_rank_of(environment) == local_rank


def test_ranks_with_the_same_local_rank_leave_each_others_snapshots_alone(tmp_path: Path):
    with rank_threads(tmp_path) as ranks:
        ranks.variables = {"LOCAL_RANK": "0", "PERDURE_FIRST_RANK": "0"}
        states = [{"step": 0, "own": rank} for rank in range(2)]
        assert ranks.begin(states) == [None, None]
        for step in (1, 2):
            assert ranks.save(step, [{"step": step, "own": rank} for rank in range(2)]) == [True, True]
            ranks.each(lambda rank: ranks.checkpointers[rank].flush())
        assert ranks.begin(states) == [2, 2]
        assert states == [{"step": 2, "own": 0}, {"step": 2, "own": 1}]
