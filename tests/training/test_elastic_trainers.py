"""Global batches with the Trainers of Hugging Face and Lightning: a training ends alike in worlds of any size, also
where the size changes in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perdure_training.elastic import GlobalBatch
from perdure_training.elastic.batch_sampler import GlobalBatchSampler
from tests.training.ranks import run_ranks

HUGGING_FACE, LIGHTNING = "global_batch_hugging_face.py", "global_batch_lightning.py"
SETS = [
    (HUGGING_FACE, ("means", "3")),
    (HUGGING_FACE, ("tokens", "3")),
    (HUGGING_FACE, ("tokens", "1")),
    (LIGHTNING, ("2",)),
    (LIGHTNING, ("1",)),
]
"""With micro-batches of one sample, one of two ranks repeats a sample of seven."""


def ends_with(folder: Path, script: str, arguments: tuple[str, ...], *worlds: tuple[int, str]) -> dict[str, Any]:
    """The parameters after worlds, each of so many ranks and up to a step."""
    out = folder / f"{'-'.join(str(ranks) for ranks, _ in worlds)}.pt"
    shown = ""
    for ranks, until in worlds:
        last = [until] if until else []
        shown = run_ranks(script, folder, ranks=ranks, arguments=[*arguments, str(out), *last]).stdout
        assert f"ended at {until or 12}" in shown
    if len(worlds) > 1:
        assert "from None" not in shown
    return torch.load(out)


@pytest.mark.long("frameworks")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "arguments"), SETS, ids=[f"{script.removesuffix('.py')}-{'-'.join(how)}" for script, how in SETS]
)
def test_a_training_ends_alike_in_worlds_of_one_and_two_ranks(
    tmp_path: Path, script: str, arguments: tuple[str, ...]
) -> None:
    alone = ends_with(tmp_path, script, arguments, (1, ""))
    together = ends_with(tmp_path, script, arguments, (2, ""))
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.long("frameworks")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "arguments"), [SETS[0], SETS[3]], ids=["hugging-face", "lightning"])
@pytest.mark.usefixtures("ranks")
def test_a_training_whose_world_grows_in_the_middle_of_an_epoch_ends_alike(
    tmp_path: Path, script: str, arguments: tuple[str, ...]
) -> None:
    alone = ends_with(tmp_path, script, arguments, (1, ""))
    grown = ends_with(tmp_path, script, arguments, (1, "8"), (2, ""))
    for name, value in alone.items():
        torch.testing.assert_close(grown[name], value, rtol=1e-9, atol=1e-9)


def test_steps_have_the_same_samples_in_worlds_of_any_size() -> None:
    def steps(ranks: int, epoch: int) -> list[set[int]]:
        found: list[set[int]] = []
        for rank in range(ranks):
            sampler = GlobalBatchSampler(20, GlobalBatch(6, micro_batch=2, rank=rank, world_size=ranks), seed=3)
            sampler.set_epoch(epoch)
            batches, count = list(sampler), len(sampler.micro_batches)
            assert len(batches) == len(sampler) == 3 * count
            of_steps = [
                {n for batch in batches[at : at + count] for n in batch} for at in range(0, len(batches), count)
            ]
            found = [one | other for one, other in zip(found, of_steps, strict=True)] if found else of_steps
        return found

    assert steps(1, 0) == steps(2, 0) == steps(3, 0)
    assert all(len(step) == 6 for step in steps(2, 0))
    assert steps(2, 0) != steps(2, 1)


def test_a_dataset_smaller_than_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^samples: the dataset has 5, fewer than the 6 of one step$"):
        GlobalBatchSampler(5, GlobalBatch(6, rank=0, world_size=1))
