"""Values of one name that differ between ranks, such as the tensors of experts or the position of a data loader.

`torch.distributed.checkpoint` takes values of one name for copies of each other, and stores those of one rank. So the
ranks compare checksums each time: values that differ are stored for each rank, under names that say of which rank they
are and of how many. Each rank of a world of that size gets its own back.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from perdure_training.checkpoint.staging import is_dense
from perdure_training.snapshots.arena import crc32

_HOLDERS = "perdure_holders"
"""Attribute of a checkpoint's metadata, which torch pickles with it and does not know: which ranks had the names that
not all of them had, such as the moments of parameters of which FSDP1 gave a rank no part."""
_MARK = re.compile(r"rank-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Digest:
    """What tells whether two ranks have the same value."""

    kind: tuple[Any, ...]
    """Type, data type and whole shape: the same for all parts of one tensor."""
    checksum: int
    is_split: bool
    """A part of a tensor that is split over ranks."""


def checksum_of(value: object) -> int:
    """Computes a checksum by content: the same for equal values, however their pickles share objects or order sets."""
    if isinstance(value, torch.Tensor):
        return tensor_checksum(value)
    stream = io.BytesIO()
    try:
        _ContentPickler(stream).dump(value)
    except ValueError:
        # An object that contains itself.
        stream = io.BytesIO(pickle.dumps(value))
    return zlib.crc32(stream.getbuffer())


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Computes the checksum of a tensor's elements."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        # Their elements are in several tensors, which only torch can list.
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return zlib.crc32(stream.getbuffer())
    if not tensor.numel():
        return 0
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Not by NumPy, which an image with torch may lack.
    content = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return crc32(memoryview(content).cast("B"))


class _ContentPickler(pickle.Pickler):
    """Writes what makes a value equal to another."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        # Objects that occur twice are written twice: whether two equal strings are one object means nothing.
        self.fast = True

    def persistent_id(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor):
            return ("tensor", str(obj.dtype), tuple(obj.shape), tensor_checksum(obj))
        if isinstance(obj, (set, frozenset)):
            # Their order differs between processes.
            return ("set", sorted(checksum_of(one) for one in cast("Iterable[object]", obj)))
        return None


def differing_names(digests: Sequence[Mapping[MetadataIndex, Digest]]) -> tuple[set[str], set[str]]:
    """Finds the names whose values differ.

    Args:
        digests: Of each rank, by name and place.

    Returns:
        The names of values that can be stored for each rank, and those of split tensors, which cannot: ranks that have
        the same part of one tensor have it with other content.
    """
    kinds: dict[str, tuple[Any, ...]] = {}
    checksums: dict[MetadataIndex, int] = {}
    differ: set[str] = set()
    split: set[str] = set()
    for of_rank in digests:
        for index, digest in of_rank.items():
            if digest.is_split:
                split.add(index.fqn)
            same_kind = kinds.setdefault(index.fqn, digest.kind) == digest.kind
            if not same_kind or checksums.setdefault(index, digest.checksum) != digest.checksum:
                differ.add(index.fqn)
    return differ - split, differ & split


def record_holders(metadata: Metadata, digests: Sequence[Mapping[MetadataIndex, Digest]]) -> None:
    """Records which ranks have the names that not all of them have.

    Args:
        metadata: The checkpoint's.
        digests: Of each rank, by name and place.
    """
    holders: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(digests):
        for name in {index.fqn for index in of_rank}:
            holders.setdefault(name, []).append(rank)
    ranks = {name: tuple(of_name) for name, of_name in holders.items() if len(of_name) < len(digests)}
    setattr(metadata, _HOLDERS, {"world_size": len(digests), "ranks": ranks})


def forget_holders(metadata: Metadata) -> None:
    """Makes a checkpoint one of which it is not known which ranks had which names."""
    setattr(metadata, _HOLDERS, {})


def names_of_others(metadata: Metadata, *, rank: int, world_size: int) -> frozenset[str]:
    """Returns the names that a rank had not when its world, of this size, saved; none where that is unknown."""
    known = cast("dict[str, Any]", getattr(metadata, _HOLDERS, {}))
    if known.get("world_size") != world_size:
        return frozenset()
    return frozenset(name for name, ranks in known["ranks"].items() if rank not in ranks)


def name_of_rank(name: str, *, rank: int, world_size: int) -> str:
    """The name under which a rank's value is stored."""
    return f"{name}.{_mark(rank, world_size)}"


def of_rank(plan: SavePlan, names: set[str], *, rank: int, world_size: int) -> SavePlan:
    """Returns a rank's plan in which these names are the rank's own."""

    def own(name: str) -> str:
        return name_of_rank(name, rank=rank, world_size=world_size) if name in names else name

    mark = _mark(rank, world_size)
    items = [replace(item, index=replace(item.index, fqn=own(item.index.fqn))) for item in plan.items]
    paths = cast("dict[str, tuple[Any, ...]]", plan.planner_data)
    paths = {own(name): (*path, mark) if name in names else path for name, path in paths.items()}
    return replace(plan, items=items, planner_data=paths)


@dataclass(frozen=True)
class OwnView:
    """A checkpoint as one rank sees it."""

    metadata: Metadata
    """With the rank's own values under the names that the state has."""
    others: Mapping[str, int]
    """Names whose values differ between ranks, of a world of another size: the size of that world."""
    own_names: Collection[str]
    """The names of the values that this rank may load."""
    paths: Mapping[str, tuple[Any, ...]]
    """Where these values are in the state."""


def own_view(
    metadata: Metadata, *, rank: int, world_size: int, replicated: bool, from_rank_0: Collection[str] = ()
) -> OwnView:
    """Returns what a rank loads.

    Args:
        metadata: The checkpoint's.
        rank: The rank that loads.
        world_size: The size of its world.
        replicated: Any rank's value serves any rank, as the script says.
        from_rank_0: Names of which a world of another size takes rank 0's value.
    """
    stored: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    paths = cast("dict[str, tuple[Any, ...]]", metadata.planner_data or {})
    for name, path in paths.items():
        mark = _MARK.fullmatch(str(path[-1])) if len(path) > 1 else None
        if mark is not None:
            whole = name.removesuffix(f".{mark[0]}")
            stored.setdefault(whole, {})[int(mark[1])] = name
            sizes[whole] = int(mark[2])
    if not stored:
        return OwnView(metadata, {}, metadata.state_dict_metadata.keys(), paths)
    others = {name: size for name, size in sizes.items() if size != world_size and name not in from_rank_0}
    chosen: dict[str, str] = {}
    for whole, names in stored.items():
        is_own = sizes[whole] == world_size
        own = names.get(rank) if is_own or whole not in from_rank_0 else names.get(0)
        if replicated:
            own = own or names[min(names)]
        if own is not None and (replicated or whole not in others):
            chosen[own] = whole
    described = dict(metadata.state_dict_metadata)
    places = dict(cast("dict[MetadataIndex, Any]", metadata.storage_data))
    described |= {whole: described[own] for own, whole in chosen.items()}
    places |= {
        replace(index, fqn=chosen[index.fqn]): place for index, place in list(places.items()) if index.fqn in chosen
    }
    of_ranks = {name for names in stored.values() for name in names.values()}
    own_metadata = replace(metadata, state_dict_metadata=described, storage_data=places)
    own_paths = {name: path for name, path in paths.items() if name not in of_ranks}
    own_paths |= {whole: paths[own][:-1] for own, whole in chosen.items()}
    return OwnView(own_metadata, others, described.keys() - of_ranks, own_paths)


def _mark(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}"
