"""The checkpointer in a world of one rank: what it saves and loads, refuses, and survives."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perdure_training.checkpoint import Checkpointer, Generators
from perdure_training.checkpoint import checkpointer as checkpointer_module
from perdure_training.checkpoint.staging import Layout, read_state
from perdure_training.events import TrainerEvents, process
from perdure_training.numbers import NumberWatch
from perdure_training.snapshots.agreement import TRUSTED_RESTORES
from perdure_training.snapshots.arena import Arena
from tests.training.checkpoint_agent import checkpoint_agent
from tests.training.events.collected import lines
from tests.training.one_rank import World
from tests.training.ranks import run_ranks


@pytest.fixture(autouse=True)
def same_generators() -> Iterator[None]:
    before = Generators().state_dict()
    yield
    Generators().load_state_dict(before)


def save(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> None:
    assert checkpointer.save(step, state)
    checkpointer.flush()


def test_a_training_continues_as_if_nothing_had_happened(world: World):
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8) * random.random()).square().mean().backward()
            optimizer.step()

    def fresh() -> dict[str, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "random": Generators(), "step": 0}

    state = fresh()
    checkpointer, step = world.begin(state)
    assert step is None
    trained(state["model"], state["optimizer"], 3)
    state["step"] = 3
    save(checkpointer, 3, state)
    trained(state["model"], state["optimizer"], 2)
    again = fresh()
    _, step = world.begin(again)
    assert (step, again["step"]) == (3, 3)
    trained(again["model"], again["optimizer"], 2)
    for expected, found in zip(state["model"].parameters(), again["model"].parameters(), strict=True):
        assert torch.equal(expected, found)


def test_data_starts_over_where_nothing_is_loaded(world: World):
    """Else a model that begins anew would miss what the world before it had read."""
    started: list[int] = []

    class Data:
        def start_over(self) -> None:
            started.append(1)

        def state_dict(self) -> dict[str, int]:
            return {"position": 5}

        def load_state_dict(self, state: dict[str, int]) -> None:
            started.append(state["position"])

    checkpointer, _ = world.begin({"data": Data()})
    assert started == [1]
    save(checkpointer, 1, {"data": Data()})
    world.begin({"data": Data()})
    assert started == [1, 5]


def test_tensors_come_back_as_they_were():
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "a": base,
        "same": base,
        "transposed": base.t(),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "number": torch.tensor(3),
        "empty": torch.zeros(0, 5),
        "sparse": torch.eye(3).to_sparse(),
        "others": [1, ("x", None), {2: base[1]}],
    }
    layout = Layout(state)
    room = memoryview(bytearray(layout.size))
    layout.copy_into(room)
    found = read_state(lambda start, size: room[start : start + size], index_at=layout.index_at, size=layout.size)
    assert found["a"] is found["same"]
    assert found["others"][:2] == [1, ("x", None)]
    torch.testing.assert_close(found["others"][2][2], base[1], rtol=0, atol=0)
    for name in ("a", "transposed", "half", "bool", "complex", "number", "empty", "sparse"):
        torch.testing.assert_close(found[name], state[name], rtol=0, atol=0)


@pytest.mark.long("survival")
@pytest.mark.usefixtures("ranks")
def test_ranks_restore_their_parts_of_a_model_that_fsdp_splits(tmp_path: Path):
    run = run_ranks("restores_parts.py", tmp_path)
    assert sorted(run.stdout.split()) == ["rank-0:True", "rank-1:True"]


@pytest.mark.long("survival")
@pytest.mark.usefixtures("ranks")
def test_a_rank_without_room_makes_all_load_an_older_step_or_none(tmp_path: Path):
    run = run_ranks("receives_without_room.py", tmp_path)
    assert sorted(run.stdout.splitlines()) == ["rank 0: 7, 6, None", "rank 1: 7, 6, None"]
    assert run.stderr.count("rank 1 takes no snapshot from another node") == 2
    assert "Raise resources.shm" in run.stderr


@pytest.mark.usefixtures("ranks")
def test_a_lost_nodes_state_comes_from_the_node_that_has_a_copy(tmp_path: Path):
    run = run_ranks("copies_to_another_node.py", tmp_path)
    assert sorted(run.stdout.splitlines()) == [
        "rank 0: 5:[5.0] 5:[5.0] 11:[11.0] 20:[20.0]",
        "rank 1: 5:[105.0] 5:[105.0] 11:[111.0] 20:[120.0]",
    ]
    assert "step 21 of rank 1 in memory is damaged, and is not loaded" in run.stderr


def test_a_restore_that_is_cut_off_is_made_again_by_the_next_world(world: World, monkeypatch: pytest.MonkeyPatch):
    class Killed(BaseException):
        """The process ends here."""

    def killed(*_: object, **__: object) -> None:
        raise Killed

    checkpointer, _ = world.begin({"step": 0})
    save(checkpointer, 5, {"step": 5})
    for place in ("load_snapshot", "Slots.adopt"):
        with monkeypatch.context() as patched:
            patched.setattr(f"perdure_training.checkpoint.generation.{place}", killed)
            with pytest.raises(Killed):
                world.begin({"step": 0})
    state = {"step": 0}
    assert world.begin(state)[1] == 5
    assert state == {"step": 5}


@pytest.mark.long("storage")
@pytest.mark.usefixtures("ranks")
def test_ranks_restore_tensors_that_are_split_in_two_dimensions_and_layers_of_a_pipeline(tmp_path: Path):
    with checkpoint_agent(tmp_path / "storage", ranks=4, every=1000) as agent:
        agent.begin(1)
        where = agent.environment | {"TEST_STORAGE": str(tmp_path / "storage")}
        run = run_ranks("restores_a_mesh.py", tmp_path / "memory", ranks=4, **where)
    assert sorted(run.stdout.splitlines()) == [f"rank {rank}: [5, True, 5, True, 5, True]" for rank in range(4)]


@pytest.mark.long("storage")
@pytest.mark.usefixtures("ranks")
def test_worlds_of_other_sizes_continue_with_what_fsdp_has_split_also_within_dictionaries_and_lists(tmp_path: Path):
    before: tuple[str, ...] = ("None",)
    with checkpoint_agent(tmp_path / "storage", every=1000) as agent:
        for generation, ranks in enumerate((4, 3, 4), start=1):
            agent.ranks = ranks
            agent.begin(generation)
            memory = tmp_path / f"memory-{generation}"
            script = "continues_in_another_world.py"
            run = run_ranks(script, memory, ranks=ranks, arguments=[str(generation)], **agent.environment)
            lines = run.stdout.splitlines()
            assert len(lines) == ranks
            assert len(set(lines)) == 1, "all ranks have the same whole tensors"
            *found, step, checksum = lines[0].split()
            assert (*found[: len(before)],) == before
            before = (step, checksum)
    assert before[0] == "6"


@pytest.mark.parametrize(
    ("of_node", "worlds"),
    [
        pytest.param(1, (4, 3, 4, 3, 2, 1, 3), id="one rank", marks=pytest.mark.long("storage")),
        pytest.param(2, (4, 2, 4), id="two ranks of a node"),
    ],
)
@pytest.mark.usefixtures("ranks")
def test_worlds_of_other_sizes_continue_from_the_memory_of_nodes_of_which_one_was_lost(
    tmp_path: Path, of_node: int, worlds: tuple[int, ...]
):
    before: tuple[str, ...] = ("None",)
    for generation, ranks in enumerate(worlds, start=1):
        arguments = [str(generation), str(of_node)]
        run = run_ranks("continues_in_another_world.py", tmp_path, ranks=ranks, arguments=arguments)
        lines = run.stdout.splitlines()
        assert len(lines) == ranks
        assert len(set(lines)) == 1, "all ranks have the same whole tensors"
        *found, step, checksum = lines[0].split()
        assert (*found[: len(before)],) == before, f"generation {generation}: {run.stderr[-2000:]}"
        before = (step, checksum)
    assert before[0] == str(2 * len(worlds))
    # The last but one world was on the first node alone: the others lacked all that their ranks need.
    for rank in range(of_node, worlds[-1]):
        received, needed = map(int, (tmp_path / f"received-{rank}").read_text().split())
        assert received > needed > 0


def test_a_restore_leaves_the_snapshot_mapped_for_later_saves_which_do_not_change_what_was_loaded(world: World):
    def fresh() -> dict[str, Any]:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "step": 0}

    first, _ = world.begin(fresh())
    saved = fresh()
    save(first, 5, saved | {"step": 5})
    restored = fresh()
    second, step = world.begin(restored)
    assert step == 5
    moments = restored["optimizer"].state_dict()["state"][0]["exp_avg"]
    before = moments.clone()
    for number in range(6, 20):
        save(second, number, fresh() | {"step": number})
    assert torch.equal(moments, before)
    assert torch.equal(before, saved["optimizer"].state_dict()["state"][0]["exp_avg"])
    again = fresh()
    assert world.begin(again)[1] == again["step"] == 19


def test_what_a_world_cannot_load_stays_for_the_next_one(world: World):
    state: dict[str, Any] = {"step": 0}
    checkpointer, _ = world.begin(state)
    save(checkpointer, 5, {"step": 5})
    header = Arena(world.folder / "stage-0" / "state").slot(0, 0, world_size=1).header()
    assert header is not None
    Arena(world.folder / "stage-0" / "state").slot(0, 0, world_size=1).finish(replace(header, world_size=2))
    smaller, step = world.begin(state)
    assert step is None
    Arena(world.folder / "stage-0" / "state").slot(0, 0, world_size=1).finish(header)
    assert world.begin(state)[1] == 5
    smaller.close()


def test_a_damaged_snapshot_is_passed_over(world: World, caplog: pytest.LogCaptureFixture):
    state = {"weight": torch.zeros(100)}
    checkpointer, _ = world.begin(state)
    for step in (1, 2):
        state["weight"].fill_(step)
        save(checkpointer, step, state)
    newest = max(world.files(), key=lambda path: path.stat().st_mtime_ns)
    with newest.open("r+b") as file:
        file.seek(4200)
        file.write(b"\xff")
    _, step = world.begin(state)
    assert (step, state["weight"][0].item()) == (1, 1.0)
    assert "step 2 of rank 0 in memory is damaged" in caplog.text


def test_steps_after_the_loaded_one_are_forgotten(world: World):
    state: dict[str, Any] = {"step": 0}
    checkpointer, _ = world.begin(state)
    for step in (1, 2, 3):
        save(checkpointer, step, {"step": step})
    newest = max(world.files(), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(b"")
    assert world.begin(state)[1] == 2
    newest.write_bytes(b"")
    assert world.begin(state)[1] == 2


def test_a_state_that_fails_after_each_load_is_distrusted(world: World):
    state: dict[str, Any] = {"step": 0}
    checkpointer, _ = world.begin(state)
    for step in (1, 2):
        save(checkpointer, step, {"step": step})
    assert [world.begin(state)[1] for _ in range(TRUSTED_RESTORES + 1)] == [2] * TRUSTED_RESTORES + [1]


def test_worlds_that_others_end_say_nothing_about_a_state(world: World, monkeypatch: pytest.MonkeyPatch):
    state: dict[str, Any] = {"step": 0}
    monkeypatch.setenv("PERDURE_SCRIPT_FAILURES", "")
    checkpointer, _ = world.begin(state)
    for step in (1, 2):
        save(checkpointer, step, {"step": step})
    assert [world.begin(state)[1] for _ in range(2 * TRUSTED_RESTORES)] == [2] * 2 * TRUSTED_RESTORES
    monkeypatch.setenv("PERDURE_SCRIPT_FAILURES", "3,5,6")
    assert world.begin(state)[1] == 1


def test_the_only_state_is_loaded_however_often_the_job_failed_after_it(world: World, caplog: pytest.LogCaptureFixture):
    state: dict[str, Any] = {"step": 0}
    checkpointer, _ = world.begin(state)
    save(checkpointer, 2, {"step": 2})
    assert [world.begin(state)[1] for _ in range(2 * TRUSTED_RESTORES)] == [2] * 2 * TRUSTED_RESTORES
    assert "there is no other state" in caplog.text


@pytest.mark.parametrize("rolls_back", [True, False])
def test_nothing_is_saved_after_a_loss_that_is_no_number_where_the_job_goes_back(
    world: World, monkeypatch: pytest.MonkeyPatch, rolls_back: bool
):
    numbers = NumberWatch({"PERDURE_ROLLS_BACK": "1"} if rolls_back else {})
    monkeypatch.setattr(checkpointer_module, "watch", numbers)
    checkpointer, _ = world.begin({"step": 0})
    numbers.follow(1, loss=0.5, gradient_norm=math.inf)
    save(checkpointer, 1, {"step": 1})
    numbers.follow(2, loss=math.nan)
    assert checkpointer.save(2, {"step": 2}) is not rolls_back
    checkpointer.flush()
    assert world.begin({"step": 0})[1] == (1 if rolls_back else 2)


def test_a_world_does_not_load_what_may_not_be_sound(world: World, monkeypatch: pytest.MonkeyPatch):
    state: dict[str, Any] = {"step": 0}
    checkpointer, _ = world.begin(state)
    for step in (1, 2, 3):
        save(checkpointer, step, {"step": step})
    monkeypatch.setenv("PERDURE_UNSOUND", "1:2:3")
    checkpointer, step = world.begin(state)
    assert step == 2
    save(checkpointer, 3, {"step": 3})
    assert world.begin(state)[1] == 3, "it was made again"


def test_a_second_checkpointer_of_one_name_is_refused(world: World):
    model, ema = {"weight": torch.ones(3)}, {"weight": torch.zeros(3)}
    checkpointer, _ = world.begin(model)
    with pytest.raises(ValueError, match=r"another one of the name 'state'.*name=") as refused:
        Checkpointer().restore(ema)
    assert "\n" not in str(refused.value)
    other = Checkpointer(name="ema", every=1)
    assert other.restore(ema) is None
    save(checkpointer, 1, model)
    save(other, 1, ema)
    assert world.begin(model)[1] == 1
    assert Checkpointer(name="ema").restore(ema) == 1
    assert (model["weight"].sum(), ema["weight"].sum()) == (3, 0)


def test_a_name_is_free_again_once_its_checkpointer_is_closed(world: World):
    fold: dict[str, Any] = {"step": 0}
    checkpointer, _ = world.begin(fold)
    save(checkpointer, 3, {"step": 3})
    checkpointer.close()
    assert Checkpointer().restore(fold) == 3


def test_another_state_is_refused_with_both_names(world: World):
    checkpointer, _ = world.begin({"step": 0})
    save(checkpointer, 1, {"step": 1})
    with pytest.raises(KeyError, match=r"the snapshot has \['step'\], the state has \['model'\]"):
        world.begin({"model": 0})


def test_each_torchrun_of_a_command_has_states_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch):
    checkpointer, _ = world.begin({"step": 0})
    save(checkpointer, 9, {"step": 9})
    monkeypatch.setenv("PERDURE_STAGE", "1")
    assert world.begin({"step": 0})[1] is None
    assert world.begin({"step": 0}, name="other")[1] is None


def test_too_little_memory_is_one_warning_and_the_training_continues(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    state = {"weight": torch.zeros(1000)}
    checkpointer, _ = world.begin(state)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not checkpointer.save(1, state)
    assert not checkpointer.save(2, state)
    [warning] = [record.message for record in caplog.records if "resources.shm" in record.message]
    assert "No space left on device" in warning
    assert "A rank needs 12," in warning
    assert world.files() == []


def test_loads_and_saves_are_events_of_the_rank(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PERDURE_PROGRESS_DIR", str(tmp_path / "run" / "progress"))
    process._own.forget()
    try:
        checkpointer, _ = world.begin(state := {"step": 3})
        save(checkpointer, 3, state)
        world.begin(state)
        assert TrainerEvents().flush()
    finally:
        process._own.forget()
    found = lines(tmp_path / "run" / "events" / "local-rank-0.jsonl")
    assert all(event["attributes"]["by"] == "Checkpointer" for event in found)
    ends = [event for event in found if event["type"] == "end"]
    assert [(event["name"], event["attributes"]["success"]) for event in ends] == [
        ("load_checkpoint", True),
        ("save", True),
        ("load_checkpoint", True),
    ]
    first, saved, loaded = (event["attributes"] for event in ends)
    assert (first["loaded_step"], loaded["loaded_step"]) == (None, 3)
    assert (first["source"], loaded["source"]) == (None, "memory")
    assert first["received_bytes"] == loaded["received_bytes"] == 0
    assert (saved["step"], saved["saved"], saved["durable"]) == (3, True, False)


def test_a_step_below_an_earlier_one_is_not_saved_and_said_once(world: World, caplog: pytest.LogCaptureFixture):
    """As with the next fold of a validation: a restart would continue with the end of the fold before."""
    checkpointer, _ = world.begin({"fold": 0, "step": 0})
    save(checkpointer, 5, {"fold": 1, "step": 5})
    assert [checkpointer.save(step, {"fold": 2, "step": step}) for step in (1, 2)] == [False, False]
    [warning] = caplog.messages
    assert warning.startswith("perdure: step 1: steps below 5 are not saved, since a restart continues with that one.")
    caplog.clear()
    save(checkpointer, 5, {"fold": 2, "step": 5})
    again = {"fold": 0, "step": 0}
    checkpointer, step = world.begin(again)
    assert (step, again) == (5, {"fold": 2, "step": 5})
    assert not checkpointer.save(4, again)
    assert caplog.messages[-1].startswith("perdure: step 4: steps below 5 are not saved")


def test_it_saves_nothing_before_it_has_restored(world: World):
    with pytest.raises(RuntimeError, match="call restore"):
        Checkpointer().save(1, {})


@pytest.mark.parametrize("variable", ["PERDURE_MEMORY_DIR", "RANK", "PERDURE_STORE"])
def test_without_perdure_it_does_nothing(world: World, monkeypatch: pytest.MonkeyPatch, variable: str):
    monkeypatch.delenv(variable)
    checkpointer = Checkpointer()
    assert checkpointer.restore({"step": 0}) is None
    assert not checkpointer.save(1, {"step": 1})
    checkpointer.flush()
    assert world.files() == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"every": 0}, "every"), ({"max_overhead": 1.0}, "max_overhead"), ({"name": "../x"}, "name")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=f"^{text}: expected"):
        Checkpointer(**arguments)


def test_many_saves_in_a_row_leave_the_last_one(world: World):
    checkpointer, _ = world.begin({"step": 0})
    for step in range(1, 101):
        checkpointer.save(step, {"step": step})
    checkpointer.flush()
    state: dict[str, Any] = {"step": 0}
    _, step = world.begin(state)
    assert step == state["step"]
    assert step is not None
    assert step >= 1
    assert len(world.files()) <= 3


def test_a_node_that_has_another_rank_now_keeps_a_replicated_state(world: World):
    """As in a job that shrinks by its first node: a survivor takes that one's rank."""
    arena = Arena(world.folder / "stage-0" / "state")
    checkpointer, _ = world.begin({"step": 0}, replicated=True)
    save(checkpointer, 7, {"step": 7})
    for slot, header in arena.snapshots():
        content = bytes(slot.read())
        room = (other := arena.slot(3, 2)).begin(len(content))
        room[:] = content
        other.finish(replace(header, rank=3, world_size=4))
        slot.clear()
    for restores in (1, 2):
        state: dict[str, Any] = {"step": 0}
        _, step = world.begin(state, replicated=True)
        assert (step, state) == (7, {"step": 7})
        assert [(header.rank, header.restores) for _, header in arena.snapshots()] == [(0, restores)]
