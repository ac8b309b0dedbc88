"""What ranks send each other of their snapshots: all of it, with its bits, or an error that names it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from perdure_training.checkpoint import part_exchange
from perdure_training.checkpoint.part_exchange import PartRequest
from tests.training.ranks import run_ranks

WITHIN = 60
"""Seconds for which a rank waits for a message that does not come."""


@given(sizes=st.lists(st.integers(1, 300), max_size=30), most=st.sampled_from([16, 64, 100]))
def test_messages_have_each_byte_of_each_part_once_and_are_bounded(sizes: list[int], most: int):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(part_exchange, "_MOST_BYTES", most)
        messages = list(part_exchange._messages(sizes))
    seen: dict[int, list[range]] = {}
    for message in messages:
        assert part_exchange._length(message) <= most
        end = 0
        for piece in message:
            assert piece.at >= end
            assert piece.at % part_exchange._ALIGNMENT == 0
            assert piece.end - piece.begin == sizes[piece.number] or sizes[piece.number] > most
            end = piece.at + piece.end - piece.begin
            seen.setdefault(piece.number, []).append(range(piece.begin, piece.end))
    assert [[byte for part in seen[number] for byte in part] for number in range(len(sizes))] == [
        list(range(size)) for size in sizes
    ]


class Wire:
    """Carries messages between two ranks that are threads."""

    def __init__(self, change: Callable[[int, bytearray], bytearray]) -> None:
        self._queues = {rank: queue.Queue[bytearray]() for rank in range(2)}
        self._change = change
        self._sent = 0

    def carry(
        self,
        sent: torch.Tensor | None,
        received: torch.Tensor | None,
        *,
        to: int | None,
        of: int | None,
        group: int,
        within: object = None,
    ) -> None:
        if to is not None and sent is not None:
            content = bytearray(sent.view(torch.uint8).numpy().tobytes())
            if group == 1:
                content = self._change(self._sent, content)
                self._sent += 1
            self._queues[to].put(content)
        if of is not None and received is not None:
            content = self._queues[group].get(timeout=WITHIN)
            assert len(content) == received.nbytes
            received.view(torch.uint8).copy_(torch.frombuffer(content, dtype=torch.uint8))


VALUES: list[torch.Tensor | bytes] = [
    torch.arange(40.0).reshape(5, 8)[1:4, ::2],
    b"a value that is larger than a message" * 20,
    torch.tensor(True),
    torch.arange(100, dtype=torch.bfloat16),
    b"small",
]


def exchanged(
    monkeypatch: pytest.MonkeyPatch,
    *,
    change: Callable[[int, bytearray], bytearray] = lambda _, content: content,
    sizes: Callable[[list[int]], Any] = lambda sizes: sizes,
) -> list[bytes]:
    """What rank 0 has of rank 1's values, which lies as these functions say."""
    wire = Wire(change)
    monkeypatch.setattr(part_exchange, "_pass", wire.carry)
    monkeypatch.setattr(part_exchange, "_MOST_BYTES", 256)
    swap = part_exchange._swap

    def lying(value: object, **names: Any) -> object:
        return swap(sizes(cast("list[int]", value)) if names["group"] == 1 and names["to"] == 0 else value, **names)

    monkeypatch.setattr(part_exchange, "_swap", lying)
    requests = [
        PartRequest(1, MetadataIndex(f"value {number}"), None, None)
        if isinstance(value, bytes)
        else PartRequest(1, MetadataIndex(f"value {number}"), ((0,) * value.dim(), tuple(value.shape)), value.nbytes)
        for number, value in enumerate(VALUES)
    ]
    found: list[bytes] = []

    def give(part: PartRequest) -> torch.Tensor | bytes:
        return VALUES[int(part.index.fqn.split()[1])]

    def run(rank: int) -> None:
        other = 1 - rank
        part_exchange._round(
            requests if rank == 0 else (),
            server=other if rank == 0 else None,
            client=other if rank == 1 else None,
            largest=1000,
            give=give,
            take=lambda _, content: found.append(bytes(content)),
            group=rank,  # pyrefly: ignore[bad-argument-type]
        )

    with ThreadPoolExecutor(2) as ranks:
        for one in [ranks.submit(run, rank) for rank in (0, 1)]:
            one.result()
    return found


def content_of(value: torch.Tensor | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_parts_arrive_in_their_order_with_their_bits(monkeypatch: pytest.MonkeyPatch):
    assert exchanged(monkeypatch) == [content_of(value) for value in VALUES]


def test_a_byte_that_changes_on_the_wire_is_found(monkeypatch: pytest.MonkeyPatch):
    def flip(number: int, content: bytearray) -> bytearray:
        # After the length of the answer and the answer.
        if number == 3:
            content[7] ^= 1
        return content

    with pytest.raises(RuntimeError, match="value 1 of rank 1 was damaged on its way from rank 1"):
        exchanged(monkeypatch, change=flip)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (lambda sizes: sizes[:-1], "rank 1 has not answered each of 5 requests"),
        (lambda _: None, "rank 1 has not answered each of 5 requests"),
        (lambda sizes: [sizes[0] + 1, *sizes[1:]], "value 0 of rank 1: rank 1 sends 49 bytes, expected 48"),
        (lambda sizes: [sizes[0], 1 << 60, *sizes[2:]], f"rank 1 sends {1 << 60} bytes, expected up to 1000"),
        (lambda sizes: [sizes[0], 0, *sizes[2:]], "rank 1 sends 0 bytes, expected up to 1000"),
    ],
    ids=["one too few", "none", "a part that is longer", "no memory for it", "nothing"],
)
def test_a_rank_that_answers_with_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, sizes: Callable[[Sequence[int]], Any], text: str
):
    with pytest.raises(RuntimeError, match=text):
        exchanged(monkeypatch, sizes=sizes)


@pytest.mark.long("survival")
@pytest.mark.usefixtures("ranks")
def test_a_rank_that_ends_while_it_sends_parts_is_an_error_of_the_others(tmp_path: Path):
    run = run_ranks("loses_a_rank_that_sends_parts.py", tmp_path, ranks=3)
    assert sorted(run.stdout.splitlines()) == ["rank 0: an error", "rank 2: an error"]


@pytest.mark.long("survival")
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("what", ["parts", "snapshot"])
def test_a_rank_that_stops_while_it_sends_is_named_by_the_one_that_waits(tmp_path: Path, what: str):
    run = run_ranks("stops_while_it_sends.py", tmp_path, ranks=2, arguments=[what])
    assert "rank 0: rank 1 has not sent " in run.stdout
    assert "it has ended or stopped, or its network is too slow" in run.stdout
