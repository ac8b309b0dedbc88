"""Global batches: each sample counts once, and once as much as any other, in a world of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure_training.elastic import GlobalBatch, MicroBatch, scaled_learning_rate
from tests.training.ranks import run_ranks

worlds = st.integers(1, 40).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(ranks, 300)))
sizes = st.none() | st.integers(1, 20)


@given(worlds, sizes)
def test_each_sample_has_the_weight_of_the_mean_over_all(world: tuple[int, int], micro_batch: int | None) -> None:
    ranks, samples = world
    found = [list(GlobalBatch(samples, micro_batch=micro_batch, rank=r, world_size=ranks)) for r in range(ranks)]
    of_sample = [0.0] * samples
    for micro in (micro for rank in found for micro in rank):
        for position in micro.positions:
            # A mean loss counts each of its samples alike, and ranks average their gradients.
            of_sample[position] += micro.weight / len(micro.positions) / ranks
    assert of_sample == pytest.approx([1 / samples] * samples)


@given(worlds, sizes)
def test_all_ranks_have_as_many_micro_batches_which_fit_into_memory(
    world: tuple[int, int], micro_batch: int | None
) -> None:
    ranks, samples = world
    batches = [GlobalBatch(samples, micro_batch=micro_batch, rank=r, world_size=ranks) for r in range(ranks)]
    assert len({len(batch) for batch in batches}) == 1
    for batch in batches:
        micros = list(batch)
        assert len(micros) == len(batch)
        assert [micro.last for micro in micros] == [False] * (len(micros) - 1) + [True]
        lengths = [len(micro.positions) for micro in micros]
        assert 1 <= min(lengths) <= max(lengths) <= min(lengths) + 1
        assert max(lengths) <= (micro_batch or samples)
        assert [p for micro in micros if micro.weight for p in micro.positions] == list(batch.positions)


def test_the_world_is_torchruns_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert GlobalBatch(10).positions == range(4, 7)


def test_one_process_without_torchrun_has_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert list(GlobalBatch(10, micro_batch=5)) == [
        MicroBatch(range(5), weight=0.5, last=False),
        MicroBatch(range(5, 10), weight=0.5, last=True),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"samples": 0}, "samples: expected at least 1, found 0"),
        ({"samples": 4, "micro_batch": 0}, "micro_batch: expected at least 1, found 0"),
        ({"samples": 4, "rank": 2, "world_size": 2}, "rank: expected one of 2 ranks from 0, found 2"),
        (
            {"samples": 4, "rank": 0, "world_size": 5},
            "samples: expected at least one for each of 5 ranks, found 4; make the batch larger, or nodes.max smaller",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(arguments: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}$"):
        GlobalBatch(**arguments)


@pytest.mark.parametrize("micro_batch", [1, 3, 5])
def test_accumulated_gradients_are_those_of_one_large_batch(micro_batch: int) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(13, 4, dtype=torch.float64), torch.randn(13, dtype=torch.float64)
    weights = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def loss(positions: range) -> torch.Tensor:
        return (inputs[positions] @ weights - targets[positions]).square().mean()

    [whole] = torch.autograd.grad(loss(range(13)), [weights])
    of_ranks = torch.zeros(4, dtype=torch.float64)
    for rank in range(3):
        for micro in GlobalBatch(13, micro_batch=micro_batch, rank=rank, world_size=3):
            of_ranks += torch.autograd.grad(micro.weight * loss(micro.positions), [weights])[0]
    torch.testing.assert_close(of_ranks / 3, whole)


@pytest.mark.long("exactness")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.usefixtures("ranks")
def test_a_training_ends_alike_in_worlds_of_any_size(tmp_path: Path, kind: str) -> None:
    ended = {}
    for ranks in (1, 2, 3):
        out = tmp_path / f"{ranks}.pt"
        run = run_ranks("global_batch.py", tmp_path, ranks=ranks, arguments=[kind, str(out)])
        ended[ranks] = torch.load(out)
        # However many micro-batches the 20 steps have. FSDP2 tells of no exchange.
        assert kind == "fsdp2" or "exchanges 20" in run.stdout
    for ranks in (2, 3):
        for name, value in ended[1].items():
            torch.testing.assert_close(ended[ranks][name], value, rtol=1e-12, atol=1e-12)


def test_a_learning_rate_grows_with_the_batch() -> None:
    assert scaled_learning_rate(0.1, tuned_for=256, samples=1024) == pytest.approx(0.4)
    assert scaled_learning_rate(0.1, tuned_for=256, samples=1024, rule="square-root") == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"^tuned_for: expected at least 1, found 0$"):
        scaled_learning_rate(0.1, tuned_for=0, samples=8)
