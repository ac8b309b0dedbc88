"""Four ranks that save over a mesh of two by two, and continue over other meshes: FSDP with tensor parallelism, HSDP,
and experts over a part of the mesh."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from perdure_training.checkpoint import Checkpointer

WHOLE = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)


def strided(mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    """Split by tensor parallelism, and each part by FSDP, in the same dimension."""
    data, model = mesh.shape
    local, none = whole, whole[:0]
    for ranks, place in ((model, mesh.get_local_rank("model")), (data, mesh.get_local_rank("data"))):
        local = (*local.chunk(ranks), *[none] * ranks)[place]
    placements = [_StridedShard(0, split_factor=model), Shard(0)]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def fresh(shape: tuple[int, int], *, step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
    whole = WHOLE + step if step else torch.zeros_like(WHOLE)
    parameters = {
        "strided": strided(mesh, whole),
        "hybrid": distribute_tensor(whole.clone(), mesh, [Replicate(), Shard(0)]),
        "experts": distribute_tensor(whole.clone(), mesh["model"], [Shard(0)]),
    }
    return {"model": parameters, "average": [one.clone() for one in parameters.values()], "step": step}


def is_whole(state: dict[str, Any], step: int) -> bool:
    tensors = [*state["model"].values(), *state["average"]]
    return state["step"] == step and all(torch.equal(one.full_tensor(), WHOLE + step) for one in tensors)


stores: list[Any] = []
found: list[object] = []
dist.init_process_group("gloo")
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"] = "run"
before: int | None = None
for generation, shape in enumerate([(2, 2), (4, 1), (1, 4), (2, 2)], start=1):
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port: list[Any] = [host.port if host else None]
    dist.broadcast_object_list(port)
    os.environ |= {"PERDURE_STORE": f"127.0.0.1:{port[0]}", "PERDURE_GENERATION": str(generation)}
    stores.append(host)
    checkpointer, state = Checkpointer(every=1, copies=0), fresh(shape, step=0)
    step = checkpointer.restore(state)
    found.append(step == before and (before is None or is_whole(state, before)))
    for before in (10 * generation, 10 * generation + 1):
        assert checkpointer.save(before, fresh(shape, step=before))
        checkpointer.flush()
    dist.barrier()
# One write: the ranks share the pipe.
os.write(1, f"rank {dist.get_rank()}: {found}\n".encode())
dist.barrier()
dist.destroy_process_group()
