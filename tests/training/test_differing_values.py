"""Values of one name that differ between ranks: each rank gets its own back from storage, or all are refused it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn.parallel import DistributedDataParallel

from perdure.contract import RestoreSource
from perdure_training.checkpoint import refused_restore
from perdure_training.checkpoint.differing import checksum_of
from perdure_training.checkpoint.planned_state import OfAnotherWorld
from perdure_training.node_api.storage_link import StorageAway, StorageLink
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

WITHIN = 60.0


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path) as ranks:
        yield ranks


def states(ranks: int, *, filled: int = 0) -> list[dict[str, Any]]:
    """Experts and positions of each rank's own, beside weights and a step that all have; new where nothing is filled
    in."""
    return [
        {
            "weights": torch.full((2000,), float(filled)),
            "experts": torch.arange(3000, dtype=torch.int64) * filled * (rank + 1),
            "loader": {"position": filled * (10 + rank), "seed": 7, "order": torch.full((3,), filled * rank)},
            "step": filled,
        }
        for rank in range(ranks)
    ]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert torch.equal(one["experts"], other["experts"])
        assert torch.equal(one["loader"].pop("order"), other["loader"].pop("order"))
        assert one["loader"] == other["loader"]
        assert one["step"] == other["step"]


def stored(ranks: RankThreads, step: int, saved: list[dict[str, Any]]) -> None:
    assert ranks.save(step, saved, durable=True) == [True] * len(saved)
    assert ranks.wait_until_durable(WITHIN) == [True] * len(saved)


def test_each_rank_gets_its_own_values_back_from_storage(ranks: RankThreads, caplog: pytest.LogCaptureFixture):
    assert ranks.begin(states(3)) == [None] * 3
    stored(ranks, 1, states(3))
    assert "differ between ranks" not in caplog.text
    # They were the same at the first save.
    for step in (2, 3):
        stored(ranks, step, states(3, filled=step))
    assert caplog.text.count("values differ between ranks") == 1
    assert "for worlds of 3: experts, loader.order, loader.position" in caplog.text
    again = states(3)
    assert ranks.begin(again, lose_memory=True) == [3, 3, 3]
    assert_same(again, states(3, filled=3))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_world_of_another_size_is_refused_values_that_differ_by_name_on_all_ranks(
    ranks: RankThreads, size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(refused_restore, "_PATIENCE", 0.0)
    ranks.begin(states(3))
    stored(ranks, 2, states(3, filled=2))
    untouched = states(size)

    def restore(rank: int) -> str:
        with pytest.raises(KeyError) as raised:
            ranks.checkpointers[rank].restore(untouched[rank])
        return str(raised.value)

    ranks.prepare(size, lose_memory=True)
    texts = ranks.each(restore)
    assert len(set(texts)) == 1
    names = "experts, loader.order, loader.position differ between the 3 ranks that saved it"
    assert names in texts[0]
    assert_same(untouched, states(size))
    [reported] = wait_for(lambda: [one for one in ranks.agent.restores if one.refused])
    assert (reported.step, reported.source, reported.of_ranks) == (2, RestoreSource.STORAGE, 3)
    assert names in reported.refused


def test_ranks_wait_for_a_world_that_can_restore(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch):
    ranks.begin(states(3))
    stored(ranks, 2, states(3, filled=2))
    ranks.prepare(2, lose_memory=True)
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(one.restore, state) for one, state in zip(ranks.checkpointers, states(2), strict=True)
        ]
        wait_for(lambda: any(one.refused for one in ranks.agent.restores))
        assert not any(one.done() for one in waiting)
        again = states(3)
        assert ranks.begin(again) == [2, 2, 2]
        assert_same(again, states(3, filled=2))
        monkeypatch.setattr(refused_restore, "_PATIENCE", 0.0)
        assert {type(one.exception()) for one in waiting} == {OfAnotherWorld}


@pytest.mark.parametrize(("on_loss", "accepts_less"), [("older", False), ("wait", True)], ids=["setting", "request"])
@pytest.mark.parametrize("lose_memory", [False, True], ids=["memory", "storage"])
def test_a_world_of_another_size_continues_with_less_where_that_is_accepted(
    ranks: RankThreads, on_loss: str, accepts_less: bool, lose_memory: bool, caplog: pytest.LogCaptureFixture
):
    ranks.begin(states(3))
    stored(ranks, 2, states(3, filled=2))
    ranks.save(4, states(3, filled=4))
    ranks.each(lambda rank: ranks.checkpointers[rank].flush())
    ranks.variables["PERDURE_KNOWN_STATES"] = json.dumps(
        {"stored": [], "on_loss": on_loss, "may_return": False, "accepts_less": accepts_less}
    )
    again = states(2)
    assert ranks.begin(again, lose_memory=lose_memory) == [None] * 2
    assert_same(again, states(2))
    assert "step 2 in storage is not loaded" in caplog.text
    assert ("step 4 in memory is not loaded" in caplog.text) is not lose_memory
    assert not any(one.refused for one in ranks.agent.restores)
    assert ranks.save(1, states(2, filled=1)) == [True] * 2


def test_what_a_world_of_another_size_can_load_is_loaded_in_place_of_a_newer_state(ranks: RankThreads):
    def same(step: int) -> list[dict[str, Any]]:
        return [states(1, filled=step)[0] for _ in range(3)]

    ranks.begin(same(0))
    stored(ranks, 2, same(2))
    ranks.save(4, states(3, filled=4))
    ranks.each(lambda rank: ranks.checkpointers[rank].flush())
    ranks.variables["PERDURE_KNOWN_STATES"] = json.dumps({"stored": [], "on_loss": "older", "may_return": False})
    again = same(0)[:2]
    assert ranks.begin(again) == [2, 2]
    assert_same(again, same(2)[:2])


def test_ranks_wait_for_another_world_as_long_as_the_agent_answers(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(refused_restore, "_PATIENCE", 0.6)
    monkeypatch.setattr(refused_restore, "_KEPT_ALIVE", 0.0)
    monkeypatch.setattr(refused_restore, "REPEATED", 0.0)
    ranks.begin(states(3))
    stored(ranks, 2, states(3, filled=2))
    ranks.prepare(2, lose_memory=True)
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(one.restore, state) for one, state in zip(ranks.checkpointers, states(2), strict=True)
        ]
        wait_for(lambda: ranks.agent.awaited_state > 10)
        assert not any(one.done() for one in waiting)
        wait_for(lambda: sum(bool(one.refused) for one in ranks.agent.restores) > 2)

        def away(*_: object, **__: object) -> None:
            raise StorageAway("the agent does not answer")

        monkeypatch.setattr(StorageLink, "ask", away)
        assert {type(one.exception()) for one in waiting} == {OfAnotherWorld}


def with_statistics(ranks: int, *, filled: int = 0) -> list[dict[str, Any]]:
    """Models under DistributedDataParallel, each rank with statistics of its own."""
    found: list[dict[str, Any]] = []
    for rank in range(ranks):
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(filled))
        model.module[1].running_var.fill_(filled * (rank + 1.0))
        found.append({"model": model, "step": filled})
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_world_of_another_size_takes_the_buffers_of_rank_0_where_ddp_broadcasts_them(ranks: RankThreads, size: int):
    ranks.begin(with_statistics(3))
    stored(ranks, 2, with_statistics(3, filled=2))
    again = with_statistics(size)
    assert ranks.begin(again, lose_memory=True) == [2] * size
    assert [one["model"].module[1].running_var.tolist() for one in again] == [[2.0] * 3] * size
    same = with_statistics(3)
    assert ranks.begin(same, lose_memory=True) == [2] * 3
    assert [one["model"].module[1].running_var[0].item() for one in same] == [2.0, 4.0, 6.0]


def test_ranks_of_another_world_take_the_values_of_rank_0_where_the_script_says_that_any_will_do(
    ranks: RankThreads, caplog: pytest.LogCaptureFixture
):
    ranks.begin(states(2), replicated=True)
    stored(ranks, 2, states(2, filled=2))
    again = states(3)
    assert ranks.begin(again, lose_memory=True, replicated=True) == [2, 2, 2]
    first, second = states(2, filled=2)
    assert_same(again, [first, second, states(2, filled=2)[0]])
    assert "although the state is replicated" in caplog.text


def test_ranks_with_tensors_of_other_shapes_and_types_get_their_own(ranks: RankThreads):
    def parts(filled: int) -> list[dict[str, Any]]:
        return [
            {"part": torch.full((4, 2), float(filled))},
            {"part": torch.full((3,), filled)},
            {"part": f"text {filled}"},
        ]

    ranks.begin(parts(0))
    stored(ranks, 1, parts(1))
    again = parts(0)
    assert ranks.begin(again, lose_memory=True) == [1, 1, 1]
    for one, other in zip(again[:2], parts(1)[:2], strict=True):
        assert torch.equal(one["part"], other["part"])
    assert again[2] == parts(1)[2]


def test_ranks_with_names_of_their_own_get_them_back(ranks: RankThreads):
    def experts(filled: int) -> list[dict[str, Any]]:
        return [{"step": filled, f"expert-{rank}": torch.full((5,), filled * (rank + 1))} for rank in range(2)]

    ranks.begin(experts(0))
    stored(ranks, 3, experts(3))
    again = experts(0)
    assert ranks.begin(again, lose_memory=True) == [3, 3]
    for rank, (one, other) in enumerate(zip(again, experts(3), strict=True)):
        assert torch.equal(one[f"expert-{rank}"], other[f"expert-{rank}"])


def test_plain_torch_loads_what_is_the_same_on_all_ranks_and_is_refused_the_rest(ranks: RankThreads):
    ranks.begin(states(2))
    stored(ranks, 2, states(2, filled=2))
    [metadata] = ranks.storage.rglob(".metadata")
    found = {"weights": torch.zeros(2000), "step": 0}
    load(found, checkpoint_id=metadata.parent)
    assert found["step"] == 2
    assert torch.equal(found["weights"], torch.full((2000,), 2.0))
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: experts"):
        load({"experts": torch.zeros(3000, dtype=torch.int64)}, checkpoint_id=metadata.parent)


def test_equal_values_have_one_checksum_whatever_their_objects_are():
    text = "".join(["position", "-1"])
    assert checksum_of([text, text]) == checksum_of(["position-1", "".join(["position-", "1"])])
    assert checksum_of({"b", "a", "c"}) == checksum_of(set("cab"))
    assert checksum_of(torch.zeros(2, 3).t()) == checksum_of(torch.zeros(3, 2))
    assert checksum_of({"a": 1}) != checksum_of({"a": 2})
    assert checksum_of((torch.zeros(2),)) != checksum_of((torch.ones(2),))
    contained: list[Any] = [1]
    contained.append(contained)
    assert isinstance(checksum_of(contained), int)


def test_a_checkpointer_of_one_rank_computes_no_checksums(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch):
    def fails(value: object) -> int:
        raise AssertionError("there is no other rank to compare with")

    monkeypatch.setattr("perdure_training.checkpoint.distributed_format.checksum_of", fails)
    ranks.begin(states(1))
    stored(ranks, 1, states(1, filled=1))


def with_mask(weights: torch.Tensor, **loader: Any) -> dict[str, Any]:
    return {"weights": weights, "loader": loader}


@pytest.mark.parametrize(
    "target",
    [
        with_mask(torch.zeros(4), position=0),
        with_mask(torch.zeros(4, dtype=torch.float64), position=0, mask=torch.zeros(2)),
        with_mask(torch.zeros(1), position=0, mask=torch.zeros(2)),
    ],
    ids=["a name of a tensor is missing", "another type", "another shape"],
)
def test_a_state_that_cannot_take_what_was_saved_as_it_is_is_refused(ranks: RankThreads, target: dict[str, Any]):
    saved = [with_mask(torch.arange(4.0), position=5, mask=torch.ones(2))]
    ranks.begin([with_mask(torch.zeros(4), position=0, mask=torch.zeros(2))])
    stored(ranks, 1, saved)
    with pytest.raises(KeyError, match=r"weights|loader\.mask"):
        ranks.begin([target], lose_memory=True)


def one_part_each(rank: int, *, steps: int) -> dict[str, Any]:
    """Optimizers with the same parameters, of which each rank trains another one, as FSDP1 gives parts to ranks."""
    parameters = [torch.nn.Parameter(torch.full((2000,), float(number))) for number in range(2)]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for _ in range(steps):
        parameters[rank].grad = torch.full((2000,), rank + 1.0)
        optimizer.step()
    return {"optimizer": optimizer, "step": steps}


def test_an_optimizer_gets_the_moments_back_that_it_had_and_none_of_another_ranks(ranks: RankThreads):
    saved = [one_part_each(rank, steps=3) for rank in range(2)]
    ranks.begin([one_part_each(rank, steps=0) for rank in range(2)])
    stored(ranks, 3, saved)
    again = [one_part_each(rank, steps=0) for rank in range(2)]
    assert ranks.begin(again, lose_memory=True) == [3, 3]
    for rank, state in enumerate(again):
        found, expected = (one["optimizer"].state_dict()["state"] for one in (state, saved[rank]))
        assert found.keys() == expected.keys() == {rank}
        assert torch.equal(found[rank]["exp_avg"], expected[rank]["exp_avg"])


def test_moments_that_some_ranks_had_are_lost_by_no_world_of_another_size(ranks: RankThreads):
    saved = [one_part_each(rank, steps=3) for rank in range(2)]
    ranks.begin([one_part_each(rank, steps=0) for rank in range(2)])
    stored(ranks, 3, saved)
    again = [one_part_each(0, steps=0)]
    assert ranks.begin(again, lose_memory=True) == [3]
    assert again[0]["optimizer"].state_dict()["state"].keys() == {0, 1}


def own_moments(rank: int, *, steps: int) -> dict[str, Any]:
    """An optimizer whose parameter is another part of the model on each rank, as FSDP1 flattens it."""
    parameter = torch.nn.Parameter(torch.zeros(2000))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    for _ in range(steps):
        parameter.grad = torch.full((2000,), rank + 1.0)
        optimizer.step()
    return {"optimizer": optimizer, "step": steps}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("lose_memory", [False, True], ids=["memory", "storage"])
def test_moments_that_differ_are_refused_also_by_an_optimizer_that_has_none_yet(
    ranks: RankThreads, size: int, lose_memory: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(refused_restore, "_PATIENCE", 0.0)
    ranks.begin([own_moments(rank, steps=0) for rank in range(2)])
    stored(ranks, 3, [own_moments(rank, steps=3) for rank in range(2)])
    untouched = [own_moments(rank, steps=0) for rank in range(size)]
    ranks.prepare(size, lose_memory=lose_memory)

    def restore(rank: int) -> str:
        with pytest.raises(OfAnotherWorld) as raised:
            ranks.checkpointers[rank].restore(untouched[rank])
        return str(raised.value)

    [text] = set(ranks.each(restore))
    assert "exp_avg" in text
    assert "differ between the 2 ranks that saved it" in text
    assert "save split tensors as DTensors, such as those of FSDP2" in text
    assert all(not one["optimizer"].state for one in untouched)
