"""A world that continues from what a world of another size has in memory."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure_training.checkpoint import Generators, resharding
from perdure_training.checkpoint.former_parts import FormerPart
from perdure_training.checkpoint.part_exchange import boxes
from perdure_training.checkpoint.peers import Peers
from perdure_training.checkpoint.planned_state import OfAnotherWorld
from perdure_training.checkpoint.staging import Layout
from perdure_training.checkpoint.values import capture
from perdure_training.checkpoint.verification import fingerprint
from perdure_training.snapshots.arena import Arena, Header
from tests.training.one_rank import World
from tests.training.ranks import run_ranks

MEMORY = Path("stage-0", "state")


def save_as_rank(memory: Path, state: Mapping[str, Any], *, rank: int, world_size: int, step: int) -> None:
    """Puts what a rank of a former world has saved where this world finds it."""
    layout = Layout(capture(state))
    slot = Arena(memory / MEMORY).slot(rank, step % 3, world_size=world_size)
    room = slot.begin(layout.size)
    layout.copy_into(room)
    header = Header(
        step=step,
        rank=rank,
        world_size=world_size,
        generation=0,
        replicated=False,
        index_at=layout.index_at,
        size=layout.size,
        checksum=fingerprint(room),
    )
    slot.finish(header)


def save_as_world(memory: Path, states: Sequence[Mapping[str, Any]], *, step: int = 7) -> None:
    for rank, state in enumerate(states):
        save_as_rank(memory, state, rank=rank, world_size=len(states), step=step)


def trained(steps: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": steps, "seen": [1, "two"]}


def test_values_that_are_the_same_on_all_ranks_continue_with_fewer(world: World):
    save_as_world(world.folder, [trained(3)] * 3)
    state = trained(0)
    _, step = world.begin(state)
    assert step == 7
    expected = trained(3)
    assert (state["step"], state["seen"]) == (3, [1, "two"])
    torch.testing.assert_close(capture(state)["model"], capture(expected)["model"], rtol=0, atol=0)
    torch.testing.assert_close(
        capture(state)["optimizer"]["state"], capture(expected)["optimizer"]["state"], rtol=0, atol=0
    )
    assert capture(state)["scheduler"] == capture(expected)["scheduler"]


def test_a_snapshot_that_cannot_be_read_any_more_says_nothing_about_the_sizes_of_worlds(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """The job would form worlds of the former size only."""
    save_as_world(world.folder, [{"step": 7}] * 2)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(resharding, "FormerSnapshot", fails)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            world.begin({"step": 0})
    assert world.begin({"step": 0})[1] == 7


def test_values_of_which_nothing_is_known_continue_as_they_are(world: World):
    def made(factor: float) -> dict[str, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=factor)
        # Functions are no part of what it saves: a list of nothing stands for them.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(pow, factor))
        return {
            "scheduler": scheduler,
            "none": None,
            "nones": [None, [None]],
            "lists": [[], [{}]],
            "no": {"a": {}},
            "pair": (None,),
        }

    save_as_world(world.folder, [made(0.5)] * 3)
    state = made(0.25)
    assert world.begin(state)[1] == 7
    assert state["scheduler"].base_lrs == [0.5]
    assert (state["none"], state["nones"], state["lists"], state["no"]) == (None, [None, [None]], [[], [{}]], {"a": {}})
    assert state["pair"] == (None,)


def test_what_is_loaded_is_saved_as_this_world_splits_it_before_the_former_worlds_is_deleted(world: World):
    arena = Arena(world.folder / MEMORY)
    save_as_world(world.folder, [{"step": 7}] * 2)
    checkpointer, step = world.begin({"step": 0})
    assert step == 7
    checkpointer.flush()
    assert sorted((header.world_size, header.rank) for _, header in arena.snapshots()) == [(1, 0), (2, 0), (2, 1)]
    assert {header.restores for _, header in arena.snapshots()} == {1}
    for number in (8, 9):
        assert checkpointer.save(number, {"step": number})
        checkpointer.flush()
    assert sorted((header.world_size, header.step) for _, header in arena.snapshots()) == [(1, 7), (1, 8), (1, 9)]
    again = {"step": 0}
    assert world.begin(again)[1] == again["step"] == 9


def test_what_an_earlier_world_of_this_size_has_left_keeps_no_room_from_newer_steps(world: World):
    # As in the memory of a node that comes back, whose launcher was killed before the world had another size.
    for step in (3, 4, 5):
        save_as_rank(world.folder, {"step": step}, rank=0, world_size=1, step=step)
    save_as_world(world.folder, [{"step": 7}] * 2)
    checkpointer, step = world.begin({"step": 0})
    assert step == 7
    checkpointer.flush()
    assert 7 in {header.step for _, header in Arena(world.folder / MEMORY).snapshots() if header.world_size == 1}
    for number in (8, 9, 10, 11):
        assert checkpointer.save(number, {"step": number})
        checkpointer.flush()


def test_where_memory_is_too_small_for_both_a_rank_has_its_room_before_copies_of_others_take_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    save_as_world(world.folder, [{"step": 7}] * 2)
    allocate, folder = os.posix_fallocate, world.folder / MEMORY

    def allocate_without_room_for_both(descriptor: int, offset: int, size: int) -> None:
        if list(folder.glob("*-of-2.*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_without_room_for_both)
    checkpointer, step = world.begin({"step": 0})
    assert step == 7
    checkpointer.flush()
    [(kept, header)] = Arena(folder).snapshots()
    assert (header.step, header.world_size) == (7, 1)
    assert [path.stat().st_size for path in folder.glob("rank-0-of-1.*")] == 3 * [kept.path.stat().st_size]


@pytest.fixture
def process_group() -> Iterator[None]:
    """One of this rank alone, which DDP needs."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("refused", "left"), [(False, {1, 2}), (True, {1})])
def test_what_was_left_stays_without_copies_unless_it_takes_their_room(
    world: World, monkeypatch: pytest.MonkeyPatch, *, refused: bool, left: set[int]
):
    def copy(self: Peers, *_: Any, **__: Any) -> bool:
        self.refused = refused
        return False

    monkeypatch.setattr(Peers, "copy", copy)
    save_as_world(world.folder, [{"step": 7}] * 2)
    checkpointer, step = world.begin({"step": 0})
    assert step == 7
    for number in range(8, 14):
        checkpointer.flush()
        assert checkpointer.save(number, {"step": number})
    checkpointer.flush()
    assert {header.world_size for _, header in Arena(world.folder / MEMORY).snapshots()} == left


def test_a_world_that_is_killed_after_it_has_loaded_is_followed_by_one_that_loads_the_same(world: World):
    save_as_world(world.folder, [{"step": 7}] * 2)
    assert world.begin({"step": 0})[1] == 7
    arena = Arena(world.folder / MEMORY)
    for slot, header in arena.snapshots():
        if header.world_size == 1:
            slot.clear()
    assert world.begin({"step": 0})[1] == 7


def test_values_that_differ_between_ranks_are_named_and_nothing_is_changed(world: World):
    states = [{"weight": torch.full((3,), 1.0), "expert": torch.full((2,), float(rank))} for rank in range(3)]
    save_as_world(world.folder, states)
    state = {"weight": torch.zeros(3), "expert": torch.zeros(2)}
    with pytest.raises(OfAnotherWorld, match="expert differs between the 3 ranks that saved it") as raised:
        world.begin(state)
    assert raised.value.ranks == 3
    assert not state["weight"].any()
    left = [header.restores for _, header in Arena(world.folder / MEMORY).snapshots()]
    assert left == [0, 0, 0], "a world of three may come again, and nothing speaks against its state"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("broadcasts", [True, False])
def test_of_buffers_that_ddp_broadcasts_those_of_rank_0_continue(world: World, *, broadcasts: bool):
    def model(rank: int) -> DistributedDataParallel:
        found = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        found.broadcast_buffers = broadcasts
        with torch.no_grad():
            for parameter in found.parameters():
                parameter.fill_(2.0)
        found.module[1].running_mean.fill_(rank + 5.0)
        return found

    save_as_world(world.folder, [{"models": [model(rank)], "step": 7} for rank in range(3)])
    state = {"models": [model(-5)], "step": 0}
    if not broadcasts:
        with pytest.raises(OfAnotherWorld, match=r"models\.0\.module\.1\.running_mean differs"):
            world.begin(state)
        return
    assert world.begin(state)[1] == 7
    assert state["models"][0].module[1].running_mean.tolist() == [5.0] * 3


def test_generators_of_ranks_that_stay_continue(world: World):
    torch.manual_seed(1)
    first = Generators()
    save_as_rank(world.folder, {"random": first, "step": 7}, rank=0, world_size=2, step=7)
    drawn = torch.rand(3)
    torch.manual_seed(2)
    save_as_rank(world.folder, {"random": Generators(), "step": 7}, rank=1, world_size=2, step=7)
    torch.manual_seed(3)
    assert world.begin({"random": Generators(), "step": 0})[1] == 7
    assert torch.equal(torch.rand(3), drawn)


def test_of_a_step_that_is_damaged_on_one_rank_nothing_is_loaded(world: World):
    save_as_world(world.folder, [{"weight": torch.full((100,), 6.0)}] * 2, step=6)
    save_as_world(world.folder, [{"weight": torch.full((100,), 7.0)}] * 2, step=7)
    path = Arena(world.folder / MEMORY).slot(1, 7 % 3, world_size=2).path
    content = bytearray(path.read_bytes())
    content[4096 + 10] ^= 1
    path.write_bytes(content)
    state = {"weight": torch.zeros(100)}
    assert world.begin(state)[1] == 6
    assert state["weight"].unique().tolist() == [6.0]


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank whose messages go nowhere, which is enough to have DTensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[int], list[Any]]:
    """The shape of a tensor, that of a mesh, and a placement for each dimension of the mesh."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    mesh = draw(st.sampled_from([[1], [2], [3], [5], [2, 2], [2, 3], [3, 2]]))
    placements = [draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])) for _ in mesh]
    return shape, mesh, placements


@given(split=splits())
def test_a_tensor_comes_back_however_it_was_split(
    tmp_path_factory: pytest.TempPathFactory, split: tuple[list[int], list[int], list[Any]]
):
    shape, mesh_shape, placements = split
    memory = tmp_path_factory.mktemp("memory")
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    ranks = math.prod(mesh_shape)
    for rank in range(ranks):
        with as_rank(rank, ranks):
            mesh = init_device_mesh("cpu", tuple(mesh_shape))
            tensor = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
            save_as_rank(memory, {"weight": tensor, "list": [tensor]}, rank=rank, world_size=ranks + 1, step=7)
    # A rank that is in no mesh has no part.
    state = {"weight": torch.zeros(shape, dtype=torch.float64), "list": [torch.zeros(shape, dtype=torch.float64)]}
    save_as_rank(memory, {"other": 1}, rank=ranks, world_size=ranks + 1, step=7)
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(memory, monkeypatch)
        checkpointer, step = world.begin(state | {"other": 0})
        checkpointer.close()
        world.close()
    assert step == 7
    assert torch.equal(state["weight"], whole)
    assert torch.equal(state["list"][0], whole)


@given(
    rows=st.integers(1, 5),
    further=st.lists(st.integers(1, 4), max_size=1),
    mesh_shape=st.sampled_from([(2, 2), (2, 3), (3, 2)]),
)
def test_a_tensor_comes_back_that_fsdp_has_split_after_tensor_parallelism(
    tmp_path_factory: pytest.TempPathFactory, rows: int, further: list[int], mesh_shape: tuple[int, int]
):
    """Over both dimensions of the mesh in the same dimension: parts are strided, and each is one piece."""
    # Tensor parallelism splits evenly.
    shape = [rows * mesh_shape[1], *further]
    memory = tmp_path_factory.mktemp("memory")
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    data, model = mesh_shape
    none = whole[:0]
    for rank in range(data * model):
        with as_rank(rank, data * model):
            mesh = init_device_mesh("cpu", mesh_shape)
            local = whole
            for ranks, place in ((model, rank % model), (data, rank // model)):
                local = (*local.chunk(ranks), *[none] * ranks)[place]
            placements = [_StridedShard(0, split_factor=model), Shard(0)]
            tensor = DTensor.from_local(
                local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            save_as_rank(memory, {"weight": tensor}, rank=rank, world_size=data * model, step=7)
    state = {"weight": torch.zeros(shape, dtype=torch.float64)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(memory, monkeypatch)
        checkpointer, step = world.begin(state)
        checkpointer.close()
        world.close()
    assert step == 7
    assert torch.equal(state["weight"], whole)


def test_a_part_of_several_pieces_is_refused():
    placements = (Shard(0), _StridedShard(0, split_factor=2))
    with pytest.raises(ValueError, match="give a rank 2 pieces of a DTensor"):
        FormerPart.of(
            torch.zeros(2), whole=torch.Size([8]), mesh_shape=(2, 2), coordinate=(0, 0), placements=placements
        )


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Shard(1), Replicate()]])
def test_a_state_continues_over_another_mesh_of_as_many_ranks(world: World, placements: list[Any]):
    whole = torch.arange(12.0).reshape(3, 4)
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        saved = {"weight": distribute_tensor(whole.clone(), mesh, [Shard(0)]), "step": 5}
        checkpointer, _ = world.begin(saved)
        assert checkpointer.save(5, saved)
        checkpointer.close()
        for dimensions in (("data", "model"), None):
            other = init_device_mesh("cpu", (1, 1), mesh_dim_names=dimensions)
            state = {"weight": distribute_tensor(torch.zeros(3, 4), other, placements), "step": 0}
            checkpointer, step = world.begin(state)
            assert step == state["step"] == 5
            assert torch.equal(state["weight"].to_local(), whole)
            assert state["weight"].device_mesh is other
            checkpointer.close()


def test_a_step_that_another_mesh_cannot_have_is_refused_by_name(world: World):
    with as_rank(0, 1):
        saved = {"weight": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])}
        checkpointer, _ = world.begin(saved)
        assert checkpointer.save(5, saved)
        checkpointer.close()
        other = init_device_mesh("cpu", (1, 1))
        state = {"weight": distribute_tensor(torch.zeros(5), other, [Shard(0), Replicate()])}
        with pytest.raises(KeyError, match=r"step 5 in memory is split in another way: .*weight"):
            world.begin(state)
        assert not state["weight"].to_local().any()


def test_a_part_that_is_not_what_its_placements_say_is_refused():
    with pytest.raises(ValueError, match=r"a part of a DTensor has the shape \[5\], and its placements give \[4\]"):
        FormerPart.of(torch.zeros(5), whole=torch.Size([8]), mesh_shape=(2,), coordinate=(0,), placements=(Shard(0),))


@given(
    lengths=st.lists(st.integers(0, 12), max_size=3).map(tuple),
    itemsize=st.sampled_from([1, 2, 8]),
    most=st.integers(1, 200),
)
def test_messages_have_each_element_of_a_box_once_and_are_bounded(lengths: tuple[int, ...], itemsize: int, most: int):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("perdure_training.checkpoint.part_exchange._MOST_BYTES", max(most, itemsize))
        found = list(boxes((tuple(3 for _ in lengths), lengths), itemsize=itemsize))
    counts = torch.zeros([3 + length for length in lengths], dtype=torch.int64)
    for start, length in found:
        assert math.prod(length) * itemsize <= max(most, itemsize)
        counts[tuple(slice(one, one + size) for one, size in zip(start, length, strict=True))] += 1
    assert counts.sum() == math.prod(lengths)
    assert math.prod(lengths) == 0 or counts[tuple(slice(3, None) for _ in lengths)].unique().tolist() == [1]


@pytest.mark.long("storage")
@pytest.mark.usefixtures("ranks")
def test_ranks_continue_over_other_meshes_with_what_fsdp_tensor_parallelism_and_experts_have_split(tmp_path: Path):
    run = run_ranks("continues_over_another_mesh.py", tmp_path, ranks=4)
    assert sorted(run.stdout.splitlines()) == [f"rank {rank}: [True, True, True, True]" for rank in range(4)]
