"""Checkpoints in memory of a state that lies on a GPU: every bit of every type, and how long a save stops training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure_training.checkpoint import Generators, pinned
from perdure_training.checkpoint.staging import Layout
from perdure_training.snapshots.arena import Arena, Slot
from tests.training.one_rank import World

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64),
)
GIBIBYTE = 1 << 30
SAVES = 7


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor on the GPU with random bits, NaNs with any payload among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, device="cuda")
    return bits.view(dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu()


def test_every_bit_of_every_type_comes_back_to_the_gpu(world: World) -> None:
    state: dict[str, Any] = {str(dtype): any_bits(dtype, 33, 17) for dtype in TYPES}
    state["truth"] = torch.rand(100, device="cuda") > 0.5
    state["transposed"] = any_bits(torch.bfloat16, 32, 64).t()
    state["strided"] = any_bits(torch.float32, 64, 64)[::2, ::3]
    state["channels last"] = torch.randn(4, 8, 5, 5, device="cuda").to(memory_format=torch.channels_last)
    state["number"] = torch.tensor(3.5, device="cuda")
    state["empty"] = torch.empty(0, 7, device="cuda")
    expected = {name: bits_of(tensor) for name, tensor in state.items()}
    checkpointer, step = world.begin(state)
    assert step is None
    assert checkpointer.save(1, state)
    checkpointer.close()

    fresh: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpointer, step = world.begin(fresh)
    checkpointer.close()
    assert step == 1
    for name, tensor in fresh.items():
        assert tensor.device == state[name].device
        assert tensor.stride() == torch.zeros_like(state[name]).stride()
        assert torch.equal(bits_of(tensor), expected[name]), name


def test_a_save_has_the_values_of_its_step_although_the_gpu_is_behind(world: World) -> None:
    """The GPU still computes what is saved when `save` is called, and changes it right after."""
    state: dict[str, Any] = {"values": torch.zeros(1 << 24, device="cuda"), "step": 0}
    checkpointer, _ = world.begin(state)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 28)
    state["values"] += 1
    assert checkpointer.save(1, state)
    state["values"] += 1
    checkpointer.close()
    fresh: dict[str, Any] = {"values": torch.zeros(1 << 24, device="cuda"), "step": 0}
    checkpointer, step = world.begin(fresh)
    checkpointer.close()
    assert step == 1
    assert bool((fresh["values"] == 1).all())


def filled(slot: Slot, state: Mapping[str, Any]) -> torch.Tensor:
    """The bytes of a state that a slot was filled with."""
    layout = Layout(state)
    room = slot.begin(layout.size)
    layout.copy_into(room)
    return torch.frombuffer(room, dtype=torch.uint8)


def test_snapshots_are_pinned_also_when_they_grow(world: World) -> None:
    slot = Arena(world.folder).slot(0, 0)
    for size in (1, 2, 3, 2):
        values = torch.rand(size << 22, device="cuda")
        bits = filled(slot, {"values": values})
        assert bits.is_pinned()
        assert torch.equal(bits[: values.numel() * 4].view(torch.float32), values.cpu())
        del bits
    slot.clear()


def test_a_driver_that_pins_no_memory_disturbs_neither_the_save_nor_the_next_kernel(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_refused", False)
    monkeypatch.setattr(pinned, "_PORTABLE", 1 << 20)
    values = torch.rand(1 << 22, device="cuda")
    bits = filled(Arena(world.folder).slot(0, 0), {"values": values})
    assert pinned._refused
    assert not bits.is_pinned()
    assert torch.equal(bits[: values.numel() * 4].view(torch.float32), values.cpu())
    assert float(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20


def test_the_gpu_draws_the_numbers_that_it_would_have_drawn(world: World) -> None:
    torch.cuda.manual_seed(11)
    state: dict[str, Any] = {"generators": Generators()}
    checkpointer, _ = world.begin(state)
    torch.rand(1000, device="cuda")
    assert checkpointer.save(1, state)
    checkpointer.close()
    expected = torch.rand(1000, device="cuda")
    torch.cuda.manual_seed(99)
    checkpointer, step = world.begin(state)
    checkpointer.close()
    assert step == 1
    assert torch.equal(torch.rand(1000, device="cuda"), expected)


def test_how_long_a_save_of_two_gibibytes_stops_training(world: World, tmp_path: Path, figures: dict[str, Any]) -> None:
    state: dict[str, Any] = {f"layer {n}": torch.randn(GIBIBYTE // 16, device="cuda") for n in range(8)}
    checkpointer, _ = world.begin(state)

    def save(step: int) -> None:
        assert checkpointer.save(step, state)

    stalls = [_seconds(lambda step=step: save(step), after=checkpointer.flush) for step in range(1, SAVES + 1)]
    checkpointer.close()
    figures["save of 2 GiB, into new memory"] = _milliseconds(stalls[:3])
    figures["save of 2 GiB, afterwards"] = _milliseconds(stalls[3:])
    for place in (world.folder, tmp_path):
        file = place / "saved.pt"
        written = [_seconds(lambda file=file: torch.save(state, file)) for _ in range(2)]
        figures[f"torch.save of 2 GiB to {'memory' if place == world.folder else 'a disk'}"] = _milliseconds(written)
        file.unlink()
    pageable = torch.empty(GIBIBYTE // 16).fill_(0)
    pinned = torch.empty(GIBIBYTE // 16, pin_memory=True)
    for name, target in {"pageable": pageable, "pinned": pinned}.items():
        copied = [_seconds(lambda target=target: [target.copy_(one) for one in state.values()]) for _ in range(4)]
        figures[f"copies of 2 GiB to {name} memory"] = _milliseconds(copied)
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    begun = time.perf_counter()
    checkpointer, step = world.begin(fresh)
    torch.cuda.synchronize()
    figures["restore of 2 GiB"] = _milliseconds([time.perf_counter() - begun])
    checkpointer.close()
    assert step == SAVES
    assert all(torch.equal(fresh[name], tensor) for name, tensor in state.items())


def _seconds(what: Callable[[], object], *, after: Callable[[], None] = lambda: None) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    what()
    torch.cuda.synchronize()
    taken = time.perf_counter() - begun
    after()
    return taken


def _milliseconds(taken: list[float]) -> str:
    return f"{statistics.median(taken) * 1000:.0f} ms"
