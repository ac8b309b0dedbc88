"""Whatever a state has: after a restore each rank has the bits that it saved, or the restore or the save is refused.

The worlds are played, rank after rank, in this process; their device meshes are real, and pass no messages.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

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
from tests.training.any_state import MOST_RANKS, Described, fresh, made, playing, same, states


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


@settings(suppress_health_check=[HealthCheck.too_slow])
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


@settings(suppress_health_check=[HealthCheck.too_slow])
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
