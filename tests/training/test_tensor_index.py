"""The table of a saved state's tensors: earlier releases had none, and do not take one for what they know."""

from __future__ import annotations

import base64
import io
import pickle
import zlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from perdure_training.checkpoint.former_parts import FormerPart
from perdure_training.checkpoint.staging import Layout, read_former_parts, read_state
from tests.training.any_state import playing

FORMER = (
    "c-p0rzi!(w5XNaqlwB7n(5*nnF6km5DUdPs&LwRgK%hk0BqE6fNufxA0_k9*12<pa$B)*doIf6ehQL8bir??}-4Q~_3?swHF$xSyUcL@r$$"
    "`9T-Cw;<zgi(<_21R$-;3;+{(`eeZO8Qh@spKKj84|U;a(4$s#UVRwMGx2@_}#g2x3`Zcf6IbhtIzu$;)Bv8|i?NSeo_P%aGE->z@+Xhe$=Z"
    "vl1c=#<dE+Nc(bu@<_en_=jaI-@({?i@6yjsN%>~b2d{8wo-3cp_b}xTr}&>@Nj;KTJ?@)+et(DCOuxg$5i$<+?@h41l%KlOn~{MpK7C?JXS"
    "4#NWD=3R2G-D<&O6<pq>3GD1QK@mwZI=Y%2a|2j7zo+v!P8>uc`9b7yF0THc*<3gjG+vv}Z4CSuV`uOMw=CM;}W2XSdrmwPz`5Akg3T_v;+"
    "PB&waq6%{G##K+Z>eOYtN^cZ*;_(eJ7rMuB_-2cqpJq_pq~Yv=6<e%^9?Aq3I14lum#r~Q=z)jhL26RrgS5crWAzU_d)9L"
)
"""The bytes of `state` as rank 1 of 2 saved it with a commit before release 0.4.0, and where its description began."""
FORMER_INDEX_AT = 256


def state(*, split: bool = True) -> dict[str, object]:
    shared = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    part = torch.tensor([3.0, 4.0])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) if split else None
    return {
        "plain": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "one": shared,
        "again": shared,
        "empty": torch.empty(0, 3),
        "weight": torch.nn.Parameter(torch.tensor([0.25])),
        "split": part if mesh is None else DTensor.from_local(part, mesh, [Shard(0)], run_check=False),
        "step": 7,
    }


def saved(of: dict[str, object]) -> tuple[memoryview, int]:
    layout = Layout(of)
    content = memoryview(bytearray(layout.size))
    layout.copy_into(content)
    return content, layout.index_at


def check(found: dict[str, object], expected: dict[str, object]) -> None:
    assert found.keys() == expected.keys()
    assert found["again"] is found["one"]
    assert isinstance(found["weight"], torch.nn.Parameter)
    assert found["step"] == 7
    for name in ("plain", "one", "empty", "weight"):
        value, other = found[name], expected[name]
        assert isinstance(value, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        assert (value.dtype, value.shape) == (other.dtype, other.shape)
        assert torch.equal(value, other)


@pytest.mark.parametrize("release", ["earlier", "this"])
def test_a_state_of_an_earlier_release_is_read(release: str):
    with playing(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        expected = state()
        former = memoryview(bytearray(zlib.decompress(base64.b85decode(FORMER)))), FORMER_INDEX_AT
        content, index_at = former if release == "earlier" else saved(expected)
        found = read_state(
            lambda start, size: content[start : start + size], index_at=index_at, size=len(content), meshes=[mesh]
        )
        check(found, expected)
        assert isinstance(found["split"], DTensor)
        assert found["split"].shape == (4,)
        assert found["split"].to_local().tolist() == [3.0, 4.0]
        parts = read_former_parts(content, index_at=index_at)
        check(parts, expected)
        assert isinstance(parts["split"], FormerPart)


def test_an_earlier_release_refuses_a_state_and_says_what_to_do():
    content, index_at = saved(state(split=False))
    with pytest.raises(KeyError, match=r"saved by a later release of Perdure.*upgrade perdure on all nodes"):
        # As it read every state.
        pickle.Unpickler(io.BytesIO(content[index_at:])).load()


def test_a_tensor_that_occurs_often_has_one_place_and_a_reference_costs_a_number():
    values = [torch.tensor([float(number)]) for number in range(1000)]
    content, index_at = saved({"values": [*values, *values]})
    assert index_at == 64 * len(values)
    assert b"Place" not in content[index_at:].tobytes()
    found = read_state(lambda start, size: content[start : start + size], index_at=index_at, size=len(content))
    assert [one.item() for one in found["values"]] == [*range(1000), *range(1000)]
    assert all(one is other for one, other in zip(found["values"][:1000], found["values"][1000:], strict=True))


def test_a_part_that_occurs_twice_is_one_part():
    with playing(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        split = DTensor.from_local(torch.tensor([1.0]), mesh, [Shard(0)], run_check=False)
        content, index_at = saved({"one": split, "again": split})
        found = read_state(
            lambda start, size: content[start : start + size], index_at=index_at, size=len(content), meshes=[mesh]
        )
        assert index_at == 64
        assert torch.equal(found["one"].to_local(), found["again"].to_local())


def test_a_table_that_is_torn_is_refused():
    content, index_at = saved(state(split=False))
    with pytest.raises((ValueError, EOFError, pickle.UnpicklingError)):
        read_state(lambda start, size: content[start : start + size], index_at=index_at, size=index_at + 200)
