"""Steps that are computed again on another rank: what is found, who is named, and what is no fault of a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perdure_training.node_api.corruption_file import (
    GRADIENTS,
    NOT_DETERMINISTIC,
    PARAMETERS,
    Corruption,
    corruption_path,
    read_corruption,
    write_corruption,
)
from perdure_training.node_api.replay_files import ReplayAnswer, answer_path, read_answer
from perdure_training.replay import Replay
from perdure_training.replay.checksums import digest, sum_bits
from perdure_training.replay.judgement import Judgement, Result, judge, judge_replicas
from perdure_training.replay.replay import steps_after_a_bad_loss
from tests.training.ranks import run_ranks

FAULTS = (
    *("none", "passing", "lasting", "lasting-from-the-start", "flaky"),
    *("random", "other-kernels", "parameter", "changes-parameters"),
    *("requested", "requested-lasting"),
)
OF_EACH_KIND = ("none", "passing", "lasting", "random", "parameter", "requested")


def check(folder: Path, ranks: int, faults: Sequence[str] = FAULTS) -> dict[str, tuple[Corruption | None, ...]]:
    """What each rank has found, by fault."""
    run_ranks("replays.py", folder / "memory", ranks=ranks, arguments=[str(folder), *faults])
    return {
        fault: tuple(read_corruption(corruption_path(folder / fault, rank), generation=0) for rank in range(ranks))
        for fault in faults
    }


def answers(folder: Path, fault: str, ranks: int) -> list[ReplayAnswer]:
    """What each rank has answered to a user's request."""
    found = [
        read_answer(answer_path(folder / fault, rank), generation=0, beneath=folder / fault) for rank in range(ranks)
    ]
    return [one for one in found if one is not None]


def result(folder: Path, fault: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{fault}-{rank}.json").read_text())


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(OF_EACH_KIND, id="a-fault-of-each-kind"),
        pytest.param(FAULTS, id="all-faults", marks=pytest.mark.long("silent-faults")),
    ],
)
def test_three_ranks_name_the_one_that_computes_wrongly(tmp_path: Path, faults: Sequence[str]):
    found = check(tmp_path, 3, faults)
    assert found["none"] == (None, None, None)
    for fault, kind, step, sound, repeats in (
        ("passing", GRADIENTS, 6, 5, False),
        ("lasting", GRADIENTS, 6, 3, True),
        ("lasting-from-the-start", GRADIENTS, 2, None, True),
        ("flaky", GRADIENTS, 6, 3, True),
        ("parameter", PARAMETERS, 6, 3, False),
    ):
        if fault not in faults:
            continue
        first, odd, last = found[fault]
        assert first is last is None, fault
        assert odd is not None, fault
        assert (odd.kind, odd.step, odd.sound, odd.suspects, odd.repeats) == (kind, step, sound, (1,), repeats), fault
        assert all(result(tmp_path, fault, rank)["spoiled"] for rank in range(3)), "sound snapshots are overwritten"
    for fault in {"random", "other-kernels"} & set(faults):
        first, *others = found[fault]
        assert first is not None, fault
        assert (first.kind, first.suspects, others) == (NOT_DETERMINISTIC, (), [None, None]), fault
        assert not result(tmp_path, fault)["spoiled"]
        assert ("the ranks have chosen other kernels" in first.checksums) == (fault == "other-kernels")
    assert found["requested"] == (None, None, None)
    sound = answers(tmp_path, "requested", 3)
    assert {(one.request, one.step, one.compared, one.problem) for one in sound} == {(7, 1, GRADIENTS, "")}
    assert len({one.checksum for one in sound}) == 3, "each rank has a batch of its own"
    assert {one.request for one in answers(tmp_path, "none", 3)} == {0}, "nothing was requested then"
    if faults is FAULTS:
        assert "compute changes the parameters" in result(tmp_path, "changes-parameters")["error"]
        _, odd, _ = found["requested-lasting"]
        assert odd is not None
        assert (odd.step, odd.suspects) == (1, (1,))
        assert all("the gradients are not the same" in one.problem for one in answers(tmp_path, "requested-lasting", 3))


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ranks")
def test_two_ranks_name_one_that_contradicts_itself_and_otherwise_none(tmp_path: Path):
    found = check(tmp_path, 2)
    assert found["none"] == (None, None)
    first, odd = found["passing"]
    assert first is None
    assert odd is not None
    assert (odd.suspects, odd.sound) == ((1,), 5)
    for fault, kind in (("lasting", GRADIENTS), ("parameter", PARAMETERS)):
        for one in found[fault]:
            assert one is not None
            assert (one.kind, one.suspects, one.sound) == (kind, (0, 1), 3), fault
    for fault in ("lasting-from-the-start", "random", "other-kernels"):
        first, second = found[fault]
        assert first is not None
        assert (first.kind, second) == (NOT_DETERMINISTIC, None), "two kinds of machines may have their own rounding"


def results(text: str) -> list[Result]:
    """`0:0a 0:1a 1:1b`: of rank 0 by itself and by rank 1, and of rank 1 by itself; the first of an owner is the
    step's."""
    known: list[Result] = []
    for owner, (by, checksum) in (part.split(":") for part in text.split()):
        is_replay = any(one.owner == int(owner) for one in known)
        known.append(Result(owner=int(owner), by=int(by), checksum=ord(checksum), is_replay=is_replay))
    return known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:0a 0:1a 1:1b 1:2b", None),
        ("0:0a 0:1x", Judgement(ranks=(0, 1))),
        ("0:0x 0:1a 0:0a 0:2a", Judgement(ranks=(0,))),
        ("0:0a 0:1x 1:1y 1:2b", Judgement(ranks=(1,), repeats=True)),
        ("0:0a 0:1a 0:0a 0:2x 1:1b 1:2b", Judgement(ranks=(2,), repeats=True)),
        ("0:0a 0:1b 0:0c 0:1d", Judgement(confirmed=True)),
        ("0:0a 0:0b", Judgement(confirmed=True)),
        ("0:0a 0:1x 0:0a 0:1x 0:0a 0:1x", Judgement(ranks=(0, 1), confirmed=True)),
        ("0:0a 0:1x 1:1b 1:2y", Judgement(ranks=(1,), repeats=True)),
        ("0:0a 0:1x 2:2b 2:3y", Judgement(confirmed=True)),
    ],
)
def test_one_rank_must_explain_all_results_that_differ(text: str, expected: Judgement | None):
    assert judge(results(text)) == expected


def test_a_rank_that_contradicts_itself_is_named_after_many_results_only():
    step, *replays = results("0:0x 0:1a 0:0a")
    known = [step, *replays * 31]
    assert judge(known) == Judgement(ranks=(0,))
    assert judge([*known, known[-1]]) == Judgement(ranks=(0,), confirmed=True)


@pytest.mark.parametrize(
    ("checksums", "odd"), [("aaa", ()), ("aab", (2,)), ("ab", (0, 1)), ("aabb", (0, 1, 2, 3)), ("aabac", (2, 4))]
)
def test_replicas_are_compared_with_the_majority(checksums: str, odd: tuple[int, ...]):
    assert judge_replicas({rank: ord(one) for rank, one in enumerate(checksums)}) == odd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_any_bit_counts_in_a_checksum(dtype: torch.dtype):
    content = torch.arange(12).to(dtype).reshape(3, 4)
    usual = digest([sum_bits(content), sum_bits(content.t())])
    size = content.element_size() * 8
    for bit in range(size):
        flipped = content.clone()
        octets = flipped.view(-1).view(torch.uint8)
        octets[bit // 8] ^= 1 << bit % 8
        assert digest([sum_bits(flipped), sum_bits(content)]) != usual
    assert digest([sum_bits(content), sum_bits(content)]) == usual


@pytest.mark.parametrize(
    ("unsound", "steps"), [("", []), ("1:55:57", [56, 57]), ("1:55:-1", []), ("1:100:200", [197, 198, 199, 200])]
)
def test_steps_are_checked_that_are_made_again_after_a_bad_loss(unsound: str, steps: list[int]):
    rank = {"RANK": "0", "PERDURE_PROGRESS_DIR": "/nowhere", "PERDURE_UNSOUND": unsound}
    assert list(steps_after_a_bad_loss(rank)) == steps
    assert list(steps_after_a_bad_loss({"PERDURE_UNSOUND": unsound})) == []


def test_alone_and_with_wrong_arguments():
    model = nn.Linear(2, 2)
    replay = Replay(model, lambda batch: model(batch).sum().item(), every=1)
    assert isinstance(replay(1, torch.ones(2)), float)
    Replay(model).compare(1)
    with pytest.raises(RuntimeError, match="expected a function"):
        Replay(model)(1, torch.ones(2))
    with pytest.raises(ValueError, match="every: expected at least 1"):
        Replay(model, every=0)
    with pytest.raises(ValueError, match="max_overhead: expected more than 0"):
        Replay(model, max_overhead=0)
    with pytest.raises(ValueError, match="model: expected parameters"):
        Replay(nn.Tanh())


FOUND = Corruption(kind=GRADIENTS, step=6, suspects=(1,), checksums=("a",) * 20, device="x" * 500, time=1.0)


def test_texts_of_a_file_are_bounded(tmp_path: Path):
    path = corruption_path(tmp_path / "progress", 1)
    write_corruption(path, FOUND, generation=7)
    read = read_corruption(path, generation=7, beneath=tmp_path)
    assert read is not None
    assert (len(read.checksums), len(read.device)) == (8, 200)
    assert read_corruption(path, generation=8, beneath=tmp_path) is None


@pytest.mark.parametrize("wrong", [{"kind": "x"}, {"step": -1}, {"step": True}, {"sound": "a"}, {"suspects": 3}])
def test_a_malformed_file_says_nothing(tmp_path: Path, wrong: dict[str, object]):
    path = corruption_path(tmp_path, 1)
    write_corruption(path, FOUND, generation=7)
    content = json.loads(path.read_text())
    content["found"] |= wrong
    path.write_text(json.dumps(content))
    assert read_corruption(path, generation=7) is None
