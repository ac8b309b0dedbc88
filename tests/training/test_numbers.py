"""What a rank writes down when its loss or its gradient norm is not a finite number."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from perdure_training.events import AsyncExporter, Event, Exporter, TrainerEvents
from perdure_training.node_api.number_file import FoundNumber, number_path, read_numbers, write_numbers
from perdure_training.numbers import NumberWatch
from perdure_training.recent_numbers import RecentNumbers
from perdure_training.shards import ShardingClient
from perdure_training.shards.shard import StreamShard, describe
from tests.training.test_report import RANK, run, run_beside_torch

IMPORTS = "from perdure_training import report\nfrom perdure_training.events import TrainerEvents\n"


def found(folder: Path, *, rank: int = 3, generation: int = 7) -> tuple[FoundNumber, ...]:
    return read_numbers(number_path(folder / "progress", rank), generation=generation, beneath=folder)


@pytest.fixture
def watch(tmp_path: Path) -> NumberWatch:
    return NumberWatch({**RANK, "PERDURE_PROGRESS_DIR": str(tmp_path / "progress")})


def test_the_first_loss_that_is_no_number_is_kept_with_the_last_finite_one(watch: NumberWatch, tmp_path: Path):
    watch.follow(40, loss=0.5)
    watch.follow(41, gradient_norm=1.0)
    assert found(tmp_path) == ()
    watch.follow(42, loss=math.nan)
    watch.follow(43, loss=math.inf)
    watch.follow(44, loss=0.5)
    [number] = found(tmp_path)
    assert (number.name, number.value, number.step, number.last_finite) == ("loss", "nan", 42, 40)
    assert number.time > 0
    assert found(tmp_path, generation=8) == ()


def test_a_norm_is_kept_beside_the_loss(watch: NumberWatch, tmp_path: Path):
    watch.follow(5, gradient_norm=-math.inf)
    watch.follow(6, loss=math.nan, gradient_norm=math.nan)
    assert [(one.name, one.value, one.step) for one in found(tmp_path)] == [
        ("grad_norm", "-inf", 5),
        ("loss", "nan", 6),
    ]


@pytest.mark.parametrize(
    "call",
    [
        "report(step=42, loss=float('nan'))",
        "TrainerEvents().metrics(step=42, loss=float('nan'), lr=0.1)",
    ],
)
def test_what_a_script_reports_is_followed(tmp_path: Path, call: str):
    run(f"{IMPORTS}report(step=41, loss=0.5)\n{call}", tmp_path)
    [number] = found(tmp_path)
    assert (number.step, number.last_finite) == (42, 41)


@pytest.mark.usefixtures("ranks")
def test_a_tensor_that_a_script_reports_is_followed(tmp_path: Path):
    run_beside_torch(
        f"import torch\n{IMPORTS}report(step=41, loss=0.5)\nreport(step=42, loss=torch.tensor(0.0) / 0)", tmp_path
    )
    [number] = found(tmp_path)
    assert (number.step, number.last_finite) == (42, 41)


def test_what_is_told_of_other_processes_is_not_followed(watch: NumberWatch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perdure_training.events.vocabulary.watch", watch)
    events = TrainerEvents(AsyncExporter(_Nowhere()), rank=1, generation=1)
    events.metrics(step=1, loss=math.nan)
    assert not watch.found


class _Nowhere(Exporter):
    def export(self, events: Sequence[Event]) -> None: ...


def test_only_a_loss_of_a_job_that_goes_back_spoils_the_state():
    for environment, loss, spoils in (
        ({"PERDURE_ROLLS_BACK": "1"}, math.nan, True),
        ({"PERDURE_ROLLS_BACK": "1"}, 0.5, False),
        ({}, math.nan, False),
    ):
        watch = NumberWatch(environment)
        watch.follow(1, loss=loss, gradient_norm=math.inf)
        assert bool(watch.spoiled_by) is spoils


@pytest.mark.parametrize(("saved", "beyond"), [(3, 3000), (2998, 3000), (2999, None), (3000, None), (6400, None)])
def test_a_save_that_counts_otherwise_than_the_losses_learns_their_step(saved: int, beyond: int | None):
    watch = NumberWatch({})
    assert watch.reported_beyond(saved) is None, "no loss was reported"
    watch.follow(2999, loss=0.5)
    watch.follow(3000, loss=math.nan)
    watch.follow(3001, gradient_norm=0.5)
    assert watch.reported_beyond(saved) == beyond


def test_spikes_are_found_against_the_recent_numbers_where_the_job_wants_them(tmp_path: Path):
    variables = {**RANK, "PERDURE_PROGRESS_DIR": str(tmp_path / "progress")}
    for environment, names in ((variables, []), ({**variables, "PERDURE_REPORT_SPIKES": "1"}, ["loss_spike"])):
        watch = NumberWatch(environment)
        for step in range(60):
            watch.follow(step, loss=2.0 + 0.1 * math.sin(step), gradient_norm=1.0)
        watch.follow(60, loss=41.234, gradient_norm=1.05)
        watch.follow(61, loss=400.0)
        assert [one.name for one in watch.found] == names
    [spike] = found(tmp_path)
    assert (spike.step, spike.value) == (60, "41.23, where 2.012 is usual,")


@pytest.mark.parametrize("factor", [0.99, 1.0, 1.01])
def test_a_training_that_goes_well_or_diverges_slowly_has_no_spike(factor: float):
    recent, noise = RecentNumbers(), random.Random(1)
    losses = (2.0 * factor**step * noise.lognormvariate(0, 0.3) for step in range(2_000))
    assert not any(map(recent.is_spike, losses))


def test_spikes_do_not_hide_the_next_one():
    recent = RecentNumbers()
    found = [recent.is_spike(50.0 if step > 40 and step % 10 == 0 else 2.0 + 0.01 * (step % 7)) for step in range(200)]
    assert [step for step, spike in enumerate(found) if spike] == list(range(50, 200, 10))


def test_outside_of_perdure_and_on_a_full_disk_nothing_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    NumberWatch({}).follow(1, loss=math.nan)
    (tmp_path / "progress").write_text("not a folder")
    NumberWatch({**RANK, "PERDURE_PROGRESS_DIR": str(tmp_path / "progress")}).follow(1, loss=math.nan)
    assert "is not reported" in caplog.text


def test_the_samples_of_the_step_are_named(watch: NumberWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perdure_training.shards.client.watch", watch)
    client = ShardingClient("numbers-of-a-test", size=40, shard_size=10)
    client.report(client.fetch() or pytest.fail("no shard"))
    client.step()
    client.report(client.fetch() or pytest.fail("no shard"))
    client.step()
    watch.follow(2, loss=math.nan)
    [number] = found(tmp_path)
    assert number.samples == ("numbers-of-a-test: samples 10, 11, 12, 13, 14, 15, 16, 17 and 2 more of epoch 0",)
    assert describe(StreamShard(partition="eu", first=3, end=5)) == "samples 3, 4 of partition eu"


_NUMBER = {"name": "loss", "value": "nan", "step": 1, "last_finite": None, "time": 1.0, "samples": []}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"generation": 7}',
        '{"generation": 7, "found": 3}',
        '{"generation": 7, "found": [{"name": "loss"}]}',
        *(
            json.dumps({"generation": 7, "found": [_NUMBER | wrong]})
            for wrong in ({"name": "x"}, {"step": -1}, {"step": True}, {"step": 10**30}, {"last_finite": "a"})
        ),
    ],
)
def test_a_malformed_file_says_nothing(tmp_path: Path, content: str):
    path = number_path(tmp_path / "progress", 3)
    path.parent.mkdir()
    path.write_text(content)
    assert found(tmp_path) == ()


def test_texts_of_a_file_are_bounded(tmp_path: Path):
    number = FoundNumber(name="loss", value="n" * 100, step=1, samples=tuple("x" * 300 for _ in range(12)))
    write_numbers(number_path(tmp_path / "progress", 3), [number], generation=7)
    content = json.loads(number_path(tmp_path / "progress", 3).read_text())
    assert content["generation"] == 7
    for one in found(tmp_path):
        assert len(one.value) == 60
        assert [len(text) for text in one.samples] == [120] * 8
