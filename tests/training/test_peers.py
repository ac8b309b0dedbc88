"""Which nodes keep the copies of which: in other racks, the same number everywhere, and agreed on by all."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from perdure_training.checkpoint.peers import Peers, copy_distances
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.snapshots.arena import Arena, Header
from perdure_training.snapshots.copies import ReceiverAddress

HEADER = Header(step=1, rank=0, world_size=4, generation=1, replicated=False, index_at=0, size=0, checksum=0)


def world(racks: str, monkeypatch: pytest.MonkeyPatch, *, copies: int = 1, ranks: int = 2) -> list[Peers]:
    """The first ranks of nodes in these racks, one letter each; `-` for one that is unknown."""
    store, peers = HashStore(), list[Peers]()
    for node, rack in enumerate(racks):
        own = RankIdentity(
            rank=node * ranks,
            world_size=len(racks) * ranks,
            local_rank=0,
            local_world_size=ranks,
            generation=1,
            folder=Path("stage-0"),
            store=("127.0.0.1", 1),
        )
        monkeypatch.setenv("PERDURE_RACK", rack.strip("-"))
        peers.append(Peers(own, store, name="state", copies=copies))
    return peers


def kept(peers: list[Peers], *, ranks: int = 2) -> list[set[int]]:
    """For each node: the nodes whose copies it keeps."""
    return [{rank // ranks for rank in one.ranks_that_copy_here()} for one in peers]


@pytest.mark.parametrize(
    ("racks", "expected"),
    [
        ("---", [{2}, {0}, {1}]),
        ("aaa", [{2}, {0}, {1}]),
        ("abab", [{1}, {0}, {3}, {2}]),
        ("aabb", [{2}, {3}, {0}, {1}]),
        # Two of three nodes of a rack have theirs in the other one, which has no more nodes.
        ("aab", [{1}, {2}, {0}]),
    ],
)
def test_each_node_keeps_copies_of_a_node_in_another_rack(
    racks: str, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
):
    assert kept(world(racks, monkeypatch)) == expected


@given(racks=st.text("abcd-", min_size=2, max_size=12), copies=st.integers(1, 4))
def test_nodes_keep_as_many_copies_as_they_have_and_in_other_racks_where_there_is_room(racks: str, copies: int):
    with pytest.MonkeyPatch.context() as monkeypatch:
        keepers = kept(world(racks, monkeypatch, copies=copies))
    count = min(copies, len(racks) - 1)
    assert all(len(found) == count for found in keepers)
    assert Counter(node for found in keepers for node in found) == dict.fromkeys(range(len(racks)), count)
    largest = max(Counter(racks.replace("-", "")).values(), default=1)
    if 2 * largest + copies - 1 <= len(racks):
        for keeper, found in enumerate(keepers):
            assert all(racks[node] != racks[keeper] or racks[node] == "-" for node in found)


def said(**changes: Any) -> str:
    return json.dumps({"ranks": 2, "receiver": "", "rack": ""} | changes)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "null", "{}", "[" * 100_000, said(rack=7), said(receiver=None)),
        *(said(ranks=ranks) for ranks in (0, -2, 3, 1 << 80, "2", 0.5, None)),
    ],
)
def test_a_node_that_says_what_cannot_be_understood_costs_no_copy_and_ends_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    first, second = world("--", monkeypatch)
    first._store.set("receiver/2", text)
    for peers in (first, second):
        assert peers.ranks_that_copy_here() == {0, 1, 2, 3}, "nothing that is here is given up for it"
        assert peers.copy(Arena(tmp_path / "stage-0" / "state").slot(0, 0), HEADER, number=0, crc32=0)


@pytest.mark.parametrize(
    "receiver",
    [
        *("{", "[]", "7", "[" * 100_000, '{"host": "127.0.0.1", "token": "t"}'),
        *(
            json.dumps({"host": "127.0.0.1", "port": port, "token": "t"})
            for port in (-1, 0, 1 << 16, 1 << 80, "7", None)
        ),
        json.dumps({"host": "a" * 300, "port": 7, "token": "t"}),
        json.dumps({"host": 7, "port": 7, "token": "t"}),
    ],
)
def test_an_address_that_is_none_costs_the_copies_and_ends_nothing(
    receiver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    first, _ = world("--", monkeypatch)
    first._store.set("receiver/2", said(receiver=receiver))
    slot = Arena(tmp_path / "stage-0" / "state").slot(0, 0)
    slot.begin(0)
    slot.finish(HEADER)
    first.copy(slot, HEADER, number=0, crc32=0)
    assert "rank 0 has no copy of its snapshots on another node" in caplog.text


def test_a_receiver_of_a_later_release_may_say_more():
    address = ReceiverAddress(host="fd00::1", port=7, token="t")
    assert ReceiverAddress.load(json.dumps(json.loads(address.dump()) | {"more": 1})) == address


def test_a_node_is_never_its_own_keeper():
    assert copy_distances(["a"], copies=1) == []
    assert all(0 not in copy_distances(["a"] * count, copies=3) for count in range(2, 6))
