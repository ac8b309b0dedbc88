"""Training states with any values: how a rank makes them, takes them, and compares them by their bits."""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

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
