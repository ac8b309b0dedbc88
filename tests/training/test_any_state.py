"""Whatever a state has, and whatever is lost: after a restore each rank has the bits that it saved, or the restore or
the save is refused.

Most worlds are played, rank after rank, in this process; their device meshes are real, and pass no messages.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure_training.checkpoint.differing import name_of_rank, own_view
from perdure_training.checkpoint.distributed_format import (
    Loading,
    metadata_file,
    plan_file,
    plan_together,
    planner_of,
    read_metadata,
)
from perdure_training.checkpoint.staging import Layout, meshes_of, read_parts, read_state
from tests.training.ranks_in_threads import rank_threads

MOST_RANKS = 3
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
FORMS = ["contiguous", "transposed", "every other", "expanded", "conjugate", "part of a larger one"]
UNUSUAL = ["quantized", "sparse", "meta"]


@dataclass(frozen=True)
class Described:
    """A value, as each rank makes it: `seed` 0 makes a new one of the same kind."""

    kind: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    form: str = "contiguous"
    differs: bool = False
    """Ranks have other content."""
    content: Any = None

    def make(self, seed: int, *, rank: int, ranks: int) -> Any:
        chance = torch.Generator().manual_seed(1000 * seed + (rank if self.differs else 0))
        match self.kind:
            case "tensor":
                return formed(self.form, self.dtype, self.shape, chance)
            case "split":
                return split(self.dtype, self.shape, chance, ranks=ranks)
            case "quantized":
                values = torch.randn(self.shape, generator=chance)
                return torch.quantize_per_tensor(values, 0.1 + seed, 3, torch.qint8)
            case "sparse":
                return torch.randint(0, 2, (4, 4), generator=chance).float().to_sparse()
            case "meta":
                return torch.empty(self.shape, device="meta")
            case "tied":
                tensor = formed("contiguous", self.dtype, self.shape, chance)
                return {"one": tensor, "other": tensor}
            case "within an object":
                return (formed(self.form, self.dtype, self.shape, chance), {"seed": seed})
            case _:
                number = int(torch.randint(1 << 30, (), generator=chance)) if self.differs else seed
                return {"value": copy.deepcopy(self.content), "number": number}


def formed(form: str, dtype: torch.dtype, shape: Sequence[int], chance: torch.Generator) -> torch.Tensor:
    """Returns a tensor with any bits: NaNs with payloads, denormal numbers, negative zeros."""
    match form:
        case "transposed":
            return bits(dtype, tuple(reversed(shape)), chance).permute(tuple(reversed(range(len(shape)))))
        case "every other" if shape:
            return bits(dtype, (2 * shape[0], *shape[1:]), chance)[::2]
        case "expanded" if shape:
            return bits(dtype, (1, *shape[1:]), chance).expand(*shape)
        case "conjugate" if dtype.is_complex:
            return bits(dtype, shape, chance).conj()
        case "part of a larger one" if shape:
            return bits(dtype, (shape[0] + 2, *shape[1:]), chance)[1:-1]
        case _:
            return bits(dtype, shape, chance)


def bits(dtype: torch.dtype, shape: Sequence[int], chance: torch.Generator) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    content = torch.randint(256, (size,), dtype=torch.uint8, generator=chance)
    return (content % 2 if dtype is torch.bool else content).view(dtype).reshape(shape).clone()


def split(dtype: torch.dtype, shape: tuple[int, ...], chance: torch.Generator, *, ranks: int) -> DTensor:
    mesh = init_device_mesh("cpu", (ranks,))
    whole = bits(dtype, shape, chance)
    placement = Shard(0) if shape else Replicate()
    parts = [whole] * ranks
    if shape:
        # As DTensors are split: parts of one size as far as there are rows.
        rows = -(-shape[0] // ranks)
        parts = [whole[min(rank * rows, shape[0]) : min((rank + 1) * rows, shape[0])] for rank in range(ranks)]
    local = parts[dist.get_rank()].clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple) | st.just((3000,)) | st.just((50, 30))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.", max_size=2), inner, max_size=3),
    max_leaves=5,
) | st.frozensets(st.text(max_size=3), max_size=3)
values = st.one_of(
    st.builds(
        Described,
        kind=st.sampled_from(["tensor", "tied", "within an object"]),
        dtype=st.sampled_from(DTYPES),
        shape=shapes,
        form=st.sampled_from(FORMS),
        differs=st.booleans(),
    ),
    st.builds(Described, kind=st.just("split"), dtype=st.sampled_from(DTYPES), shape=shapes),
    st.builds(Described, kind=st.just("plain"), content=plain, differs=st.booleans()),
    st.builds(Described, kind=st.sampled_from(UNUSUAL), shape=shapes, differs=st.booleans()),
)
states = st.dictionaries(st.sampled_from(["model", "optimizer", "loader", "step"]), values, min_size=1)


@contextmanager
def playing(rank: int, ranks: int) -> Iterator[None]:
    """Makes this process a rank whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fresh(described: Mapping[str, Described], *, rank: int, ranks: int) -> dict[str, Any]:
    """A new state, which takes what was saved. Nobody can write to a tensor whose elements share their memory."""
    return {
        name: (replace(value, form="contiguous") if value.form == "expanded" else value).make(0, rank=rank, ranks=ranks)
        for name, value in described.items()
    }


def made(described: Mapping[str, Described], seed: int, *, rank: int, ranks: int) -> dict[str, Any]:
    return {name: value.make(seed, rank=rank, ranks=ranks) for name, value in described.items()}


class SaveRefused(Exception):
    """The library refuses to store a state."""


class Stored:
    """What a world has stored."""

    def __init__(self, states: Sequence[tuple[Layout, Sequence[DeviceMesh]]]) -> None:
        """Stores the state of each rank, as the ranks do together.

        Raises:
            SaveRefused: if they refuse it.
        """
        ranks = len(states)
        snapshots = [memoryview(bytearray(layout.size)) for layout, _ in states]
        self.files: dict[str, bytes] = {}
        try:
            planners: list[Any] = []
            for rank, ((layout, meshes), snapshot) in enumerate(zip(states, snapshots, strict=True)):
                layout.copy_into(snapshot)
                with playing(rank, ranks):
                    planners.append(
                        planner_of(read_parts(snapshot, index_at=layout.index_at, meshes=meshes), rank=rank)
                    )
            plans = [planner.create_local_plan() for planner in planners]
            digests = [planner.digests(plan) for planner, plan in zip(planners, plans, strict=True)]
            finals, metadata, differ = plan_together(planners[0], list(zip(plans, digests, strict=True)))
            results: list[Any] = []
            for rank, (planner, final) in enumerate(zip(planners, finals, strict=True)):
                planner.rename({name_of_rank(name, rank=rank, world_size=ranks): name for name in differ})
                file = plan_file(planner.finish_plan(final), planner, snapshots[rank], rank=rank)
                self.files[file.name] = assembled(file.recipe, snapshots[rank])
                assert len(self.files[file.name]) == file.size
                results.append(file.results)
        except (ValueError, RuntimeError) as error:
            raise SaveRefused(str(error)) from error
        self.metadata = metadata_file(metadata, results)

    def load(self, target: dict[str, Any], *, rank: int, ranks: int, replicated: bool) -> str:
        """Loads a rank's state; returns why it cannot be loaded."""
        view = own_view(read_metadata(self.metadata), rank=rank, world_size=ranks, replicated=replicated)
        loading = Loading(target, view.metadata)
        others = "" if replicated else ", ".join(name for name in view.others if name in loading.names)
        if others or loading.problem:
            return others or loading.problem
        loading.read(lambda name, offset, length: bytearray(self.files[name][offset : offset + length]))
        return ""


def assembled(recipe: bytes, snapshot: memoryview) -> bytes:
    """The file that an agent makes of a rank's recipe."""
    [length] = struct.unpack_from("<Q", recipe)
    others = recipe[8 + length :]
    sources = {0: memoryview(others), 1: snapshot}
    pieces = json.loads(recipe[8 : 8 + length])
    return b"".join(sources[int(in_place)][offset : offset + size] for in_place, offset, size in pieces)


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same bits."""
    if isinstance(one, DTensor):
        return isinstance(other, DTensor) and one.shape == other.shape and same(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and content_of(one) == content_of(other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return isinstance(other, float) and struct.pack("d", one) == struct.pack("d", other)
    return type(one) is type(other) and one == other


def content_of(tensor: torch.Tensor) -> Any:
    kind = (tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.device.type)
    if tensor.device.type == "meta":
        return kind
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return kind, content_of(tensor.indices()), content_of(tensor.values())
    if tensor.is_quantized:
        return kind, content_of(tensor.int_repr()), tensor.q_scale(), tensor.q_zero_point()
    if not tensor.numel():
        return kind
    flat = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return kind, bytes(flat.tolist())


def laid_out(described: Mapping[str, Described], ranks: int) -> list[tuple[Layout, Sequence[DeviceMesh]]]:
    """The states of a world's ranks.

    Raises:
        SaveRefused: if one of them cannot be saved at all.
    """
    states: list[tuple[Layout, Sequence[DeviceMesh]]] = []
    for rank in range(ranks):
        with playing(rank, ranks):
            state = made(described, 1, rank=rank, ranks=ranks)
            try:
                states.append((Layout(state), meshes_of(state)))
            except ValueError as error:
                raise SaveRefused(str(error)) from error
    return states


def may_refuse_save(described: Mapping[str, Described]) -> bool:
    return any(value.kind in ("meta", "plain") for value in described.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states, st.integers(1, MOST_RANKS), st.integers(1, MOST_RANKS), st.booleans())
def test_a_restore_from_storage_is_exact_or_refused(
    described: dict[str, Described], ranks: int, later: int, replicated: bool
):
    try:
        stored = Stored(laid_out(described, ranks))
    except SaveRefused as error:
        event(f"the save is refused: {str(error)[:40]}")
        if not may_refuse_save(described):
            raise
        return
    refusals: list[str] = []
    for rank in range(later):
        with playing(rank, later):
            target = fresh(described, rank=rank, ranks=later)
            refusals.append(stored.load(target, rank=rank, ranks=later, replicated=replicated))
            if not refusals[-1]:
                source = rank if rank < ranks else 0
                expected = made(described, 1, rank=rank, ranks=later) if source == rank else None
                if expected is None:
                    expected = {
                        name: value.make(1, rank=rank if value.kind == "split" else source, ranks=later)
                        for name, value in described.items()
                    }
                assert same(target, expected), (target, expected)
    if any(refusals):
        event(f"the restore is refused: {max(refusals)[:40]}")
        differs = later != ranks and not replicated and any(value.differs for value in described.values())
        assert differs, refusals


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states, st.integers(1, MOST_RANKS))
def test_a_snapshot_has_the_bits_that_were_saved(described: dict[str, Described], ranks: int):
    try:
        states = laid_out(described, ranks)
    except SaveRefused as error:
        event(f"the save is refused: {str(error)[:40]}")
        if not may_refuse_save(described):
            raise
        return
    for rank, (layout, meshes) in enumerate(states):
        room = memoryview(bytearray(layout.size))
        layout.copy_into(room)
        with playing(rank, ranks):
            found = read_state(
                lambda offset, size, room=room: room[offset : offset + size],
                index_at=layout.index_at,
                size=layout.size,
                meshes=meshes,
            )
            expected = made(described, 1, rank=rank, ranks=ranks)
            assert same(found, expected), (found, expected)


def parts_of(sizes: Sequence[int], *, filled: float, placement: Placement) -> dict[str, Any]:
    """The state of a played rank: a DTensor with parts of these sizes, one for each rank."""
    mesh = init_device_mesh("cpu", (len(sizes),))
    local = torch.full((sizes[dist.get_rank()],), filled)
    whole = torch.Size([sum(sizes) if placement.is_shard() else sizes[0]])
    return {"model": {"table": DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole, stride=(1,))}}


def stored_parts(sizes: Sequence[int], placement: Placement) -> Stored:
    saved: list[tuple[Layout, Sequence[DeviceMesh]]] = []
    for rank in range(len(sizes)):
        with playing(rank, len(sizes)):
            state = parts_of(sizes, filled=1.0, placement=placement)
            saved.append((Layout(state), meshes_of(state)))
    return Stored(saved)


@pytest.mark.parametrize("sizes", [(4,), (4, 4, 4), (5, 1)])
def test_a_dtensor_that_cannot_be_split_over_another_world_is_refused_by_its_name(sizes: Sequence[int]):
    """Of another whole size, as one that has a row for each rank; and with parts that no placement makes."""
    stored = stored_parts((3, 3), Shard(0))
    refusals: list[str] = []
    for rank in range(len(sizes)):
        with playing(rank, len(sizes)):
            target = parts_of(sizes, filled=0.0, placement=Shard(0))
            refusals.append(stored.load(target, rank=rank, ranks=len(sizes), replicated=False))
            assert not target["model"]["table"].to_local().any()
    assert all("model.table" in refusal for refusal in refusals), refusals


@pytest.mark.parametrize(
    ("sizes", "placement", "text"), [((1, 5), Shard(0), "have other sizes"), ((4, 4), Partial(), "not added up")]
)
def test_a_dtensor_whose_parts_no_other_world_could_take_is_stored_by_none(
    sizes: Sequence[int], placement: Placement, text: str
):
    with pytest.raises(SaveRefused, match=text) as refused:
        stored_parts(sizes, placement)
    assert "model.table" in str(refused.value)


class Loss(StrEnum):
    """What is lost after steps 1 and 2 were stored, and step 3 was saved in memory."""

    NOTHING = "nothing"
    MEMORY_OF_A_RANK = "the memory of a rank"
    MEMORY = "all memory"
    NEWEST_CHECKPOINT = "all memory, and a part of the newest checkpoint"


CONTINUES_WITH = {Loss.NOTHING: 3, Loss.MEMORY_OF_A_RANK: 2, Loss.MEMORY: 2, Loss.NEWEST_CHECKPOINT: 1}

written = values.filter(lambda value: value.kind not in ("split", "meta", "quantized"))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(st.sampled_from(["model", "loader"]), written, min_size=2), st.integers(1, 2), st.sampled_from(Loss)
)
def test_ranks_continue_with_the_bits_of_a_step_that_all_of_them_saved(
    tmp_path_factory: pytest.TempPathFactory, described: dict[str, Described], size: int, loss: Loss
):
    def state(seed: int) -> list[dict[str, Any]]:
        return [made(described, seed, rank=rank, ranks=size) for rank in range(size)]

    with rank_threads(tmp_path_factory.mktemp("ranks")) as ranks:
        found = [fresh(described, rank=rank, ranks=size) for rank in range(size)]
        assert ranks.begin(found) == [None] * size
        for step in (1, 2):
            assert ranks.save(step, state(step), durable=True) == [True] * size
            assert ranks.wait_until_durable(60) == [True] * size
        assert ranks.save(3, state(3)) == [True] * size
        ranks.each(lambda rank: ranks.checkpointers[rank].flush())
        if loss is Loss.MEMORY_OF_A_RANK:
            for snapshot in ranks.memory.rglob("rank-0.*"):
                snapshot.unlink()
        if loss is Loss.NEWEST_CHECKPOINT:
            newest = next(ranks.storage.glob("step-2-*")) / "__0_0.distcp"
            newest.write_bytes(newest.read_bytes() + b"torn")
        found = [fresh(described, rank=rank, ranks=size) for rank in range(size)]
        expected = CONTINUES_WITH[loss]
        lose_memory = loss in (Loss.MEMORY, Loss.NEWEST_CHECKPOINT)
        assert ranks.begin(found, lose_memory=lose_memory) == [expected] * size
        assert same(found, state(expected)), (found, state(expected))
