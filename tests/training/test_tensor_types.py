"""Tensors of types of their own are after a restore what they were, or refused by their name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from perdure_training.checkpoint.staging import Layout, read_state
from tests.training.one_rank import World
from tests.training.test_objects_of_a_state import Site, site

__all__ = ["site"]


class Named(torch.Tensor):
    """Has its elements itself, and a unit."""

    unit: str

    @staticmethod
    def of(content: torch.Tensor, unit: str) -> Named:
        tensor = torch.Tensor._make_subclass(Named, content)
        tensor.unit = unit
        return tensor


class Scaled(torch.Tensor):
    """Has small numbers and their scale, in tensors of its own, as quantized parameters do."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.numbers = numbers
        self.scale = scale

    @staticmethod
    def of(content: torch.Tensor) -> Scaled:
        scale = content.abs().max() / 100
        return Scaled((content / scale).round().to(torch.int8), scale)

    def whole(self) -> torch.Tensor:
        return self.numbers * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Scaled:
        return Scaled(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            [one] = arguments
            return cls(func(one.numbers), func(one.scale))
        if func is torch.ops.aten.copy_.default:
            # As torchao's do where the scale is another: another numbers, with a loss.
            target, value = arguments[:2]
            if isinstance(target, Scaled):
                target.numbers.copy_((value.whole() if isinstance(value, Scaled) else value) / target.scale)
                return target
        plain = [one.whole() if isinstance(one, Scaled) else one for one in arguments]
        return func(*plain, **(named or {}))


class Quantized(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(Scaled.of(weight), requires_grad=False)
        self.named = nn.Parameter(Named.of(torch.full((3,), float(seed)), "m"), requires_grad=False)


def parts_of(tensor: Any) -> list[torch.Tensor]:
    return [tensor.numbers, tensor.scale] if isinstance(tensor, Scaled) else [tensor.detach()]


def read_again(state: Any) -> Any:
    layout = Layout(state)
    room = memoryview(bytearray(layout.size))
    layout.copy_into(room)
    return read_state(lambda at, size: room[at : at + size], index_at=layout.index_at, size=layout.size)


def test_a_snapshot_keeps_the_types_of_tensors():
    shared = torch.ones(2)
    state = {
        "parameter": nn.Parameter(torch.arange(3.0)),
        "fixed": nn.Parameter(torch.arange(3), requires_grad=False),
        "buffer": nn.Buffer(torch.arange(3.0), persistent=False),
        "named": Named.of(torch.arange(4.0), "kg"),
        "scaled": Scaled.of(torch.arange(6.0).reshape(2, 3)),
        "twice": [shared, shared],
    }
    found = read_again(state)
    assert [type(one) for one in found.values()] == [type(one) for one in state.values()]
    assert found["parameter"].requires_grad
    assert not found["fixed"].requires_grad
    assert found["buffer"]._is_buffer
    assert not found["buffer"].persistent
    assert found["named"].unit == "kg"
    for name in ("parameter", "fixed", "buffer", "named", "scaled"):
        for one, other in zip(parts_of(found[name]), parts_of(state[name]), strict=True):
            assert torch.equal(one, other)
    assert found["twice"][0] is found["twice"][1]


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_tensors_of_types_of_their_own_come_back_as_they_were_saved(site: Site, source: str):
    def made(seed: int) -> dict[str, Any]:
        content = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        return {
            "model": Quantized(seed),
            "named": Named.of(content.clone(), f"unit {seed}"),
            "list": [Scaled.of(content), nn.Parameter(content)],
            "average": {"scaled": Scaled.of(content * 2)},
        }

    saved = made(1)
    checkpointer, _ = site.begin(saved)
    assert checkpointer.save(3, saved, durable=True)
    assert checkpointer.wait_until_durable(60)
    state = made(2)
    weight, named = state["model"].weight, state["named"]
    _, step = site.begin(state, lose_memory=source == "storage")
    assert step == 3
    assert state["model"].weight is weight
    assert state["named"] is named
    assert named.unit == "unit 1"
    pairs = [
        (weight, saved["model"].weight),
        (state["model"].named, saved["model"].named),
        (named, saved["named"]),
        (state["list"][0], saved["list"][0]),
        (state["list"][1], saved["list"][1]),
        (state["average"]["scaled"], saved["average"]["scaled"]),
    ]
    for found, other in pairs:
        assert type(found) is type(other)
        for one, two in zip(parts_of(found), parts_of(other), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_a_tensor_of_another_type_is_refused_by_its_name_and_nothing_is_changed(site: Site, source: str):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
            self.named = nn.Parameter(torch.zeros(3), requires_grad=False)

    saved = {"model": Quantized(1)}
    checkpointer, _ = site.begin(saved)
    assert checkpointer.save(3, saved, durable=True)
    assert checkpointer.wait_until_durable(60)
    model = Plain()
    with pytest.raises(KeyError, match=r"model\.(weight|named)"):
        site.begin({"model": model}, lose_memory=source == "storage")
    assert not model.weight.any()


def test_a_type_that_cannot_be_saved_is_refused_before_anything_is_trained(world: World):
    class Local(torch.Tensor):
        pass

    tensor = torch.Tensor._make_subclass(Local, torch.zeros(3))
    with pytest.raises(TypeError, match=r"state: list\.1 is a Local, which cannot be saved as such"):
        world.begin({"list": [0, tensor]})


def test_a_snapshot_waits_for_devices_that_copy_later(monkeypatch: pytest.MonkeyPatch):
    later: list[Any] = []

    class OnDevice(torch.Tensor):
        """Is on a device whose copies are made when it is waited for."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            if func == torch.Tensor.device.__get__:
                return torch.device("xpu", 0)
            if func == torch.Tensor.copy_ and (named or {}).get("non_blocking"):
                later.append(arguments)
                return arguments[0]
            return super().__torch_function__(func, types, arguments, named or {})

    def wait(device: torch.device) -> None:
        assert device == torch.device("xpu", 0)
        with torch._C.DisableTorchFunctionSubclass():
            for target, value in later:
                target.copy_(value)

    monkeypatch.setattr(torch.xpu, "synchronize", wait)
    content = torch.arange(100.0)
    layout = Layout([content])
    layout._tensors.tensors = [content.as_subclass(OnDevice)]
    room = memoryview(bytearray(layout.size))
    layout.copy_into(room)
    assert later, "it was not waited for each copy"
    found = read_state(lambda at, size: room[at : at + size], index_at=layout.index_at, size=layout.size)
    assert torch.equal(found[0], content)
