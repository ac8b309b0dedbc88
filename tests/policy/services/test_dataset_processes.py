"""Datasets of a service: its processes begin one by one, and those beside them continue."""

from __future__ import annotations

from typing import Any

from perdure.contract.datasets import DatasetParameters, Position, ShardRequest, Term
from perdure.workflows.policy.services.dataset_views import view
from perdure.workflows.policy.services.datasets import begin, exchange
from perdure.workflows.policy.services.spans import size

WHOLE = DatasetParameters(size=100, shard_size=8, epochs=2)


def of(rank: int, **fields: Any) -> ShardRequest:
    return ShardRequest(rank=rank, world_size=2, **fields)


def test_a_process_that_begins_beside_others_moves_the_dataset_to_no_position():
    state, saved = begin(WHOLE), Position(next=8)
    state, first = exchange(state, WHOLE, Term(generation=1), of(0, shards=2), keeps_processes=True)
    state, second = exchange(state, WHOLE, Term(generation=1), of(1, shards=1), keeps_processes=True)
    rewound = Term(generation=2, rewinds=1)
    state, began = exchange(state, WHOLE, rewound, of(0, position=saved), keeps_processes=True)
    assert began.not_taken
    done = of(1, continues=True, done=second.granted)
    state, goes_on = exchange(state, WHOLE, Term(generation=2), done, keeps_processes=True)
    assert not goes_on.superseded, "it does not wait for a position that it never loads"
    assert view(state).done == size(second.granted)
    state, again = exchange(state, WHOLE, rewound, of(0, shards=1), keeps_processes=True)
    assert again.granted[0][0] == first.granted[0][0], "what the process before it had leased is read again"


def test_the_first_process_of_several_moves_a_dataset_that_nothing_was_read_of():
    state, rewound = begin(WHOLE), Term(generation=1, rewinds=1)
    state, first = exchange(state, WHOLE, rewound, of(0, shards=1, position=Position(next=16)), keeps_processes=True)
    state, same = exchange(state, WHOLE, rewound, of(1, shards=1, position=Position(next=16)), keeps_processes=True)
    assert [(one.granted, one.not_taken) for one in (first, same)] == [(((16, 24),), False), (((24, 32),), False)]
    state, other = exchange(state, WHOLE, rewound, of(1, position=Position(next=8)), keeps_processes=True)
    assert (other.not_taken, other.refused) == (True, "")


def test_a_process_alone_moves_its_dataset():
    state, term = begin(WHOLE), Term(generation=1)
    state, _ = exchange(state, WHOLE, term, ShardRequest(rank=0, shards=2), keeps_processes=True)
    one = ShardRequest(rank=0, shards=1, position=Position())
    _, answer = exchange(state, WHOLE, Term(generation=1, rewinds=1), one, keeps_processes=True)
    assert (answer.granted, answer.not_taken) == (((0, 8),), False)
