"""Four ranks with tensors that are split in two dimensions, and layers of a pipeline that only two of them have: from
memory, from storage, and from storage with torch alone over another mesh."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from perdure_training.checkpoint import Checkpointer

WHOLE = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
LAYER = torch.arange(12.0)


def fresh(mesh: DeviceMesh, *, filled: bool) -> dict[str, Any]:
    """Layers of two pipeline stages, the first ranks' and the last ranks'."""
    whole, layer = (WHOLE, LAYER) if filled else (torch.zeros_like(WHOLE), torch.zeros_like(LAYER))
    stage = mesh.get_local_rank("pp")
    part = distribute_tensor(layer.clone(), mesh["tp"], [Shard(0)])
    return {
        "model": {
            "both": distribute_tensor(whole.clone(), mesh, [Shard(0), Shard(1)]),
            "mixed": distribute_tensor(whole.clone(), mesh, [Replicate(), Shard(0)]),
            f"stage{stage}": part,
        },
        "step": 5 if filled else 0,
    }


def is_whole(state: dict[str, Any]) -> bool:
    model = state["model"]
    tensors = [value.full_tensor() for value in model.values() if isinstance(value, DTensor)]
    expected = [LAYER if name.startswith("stage") else WHOLE for name in model]
    return all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))


def restored(state: dict[str, Any]) -> tuple[Checkpointer, int | None]:
    """Restores as the ranks of a new generation do, which has a store of its own."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port: list[Any] = [host.port if host else None]
    dist.broadcast_object_list(port)
    os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
    os.environ["PERDURE_GENERATION"] = "1"
    stores.append(host)
    checkpointer = Checkpointer(every=1, copies=0)
    return checkpointer, checkpointer.restore(state)


stores: list[Any] = []
found: list[object] = []
dist.init_process_group("gloo")
# The run that the agent knows.
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"] = "run"
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
checkpointer, step = restored(fresh(mesh, filled=False))
assert step is None
assert checkpointer.save(5, fresh(mesh, filled=True), durable=True)
assert checkpointer.wait_until_durable(100)
dist.barrier()
for lost in (False, True):
    if lost and dist.get_rank() == 0:
        shutil.rmtree(os.environ["PERDURE_MEMORY_DIR"])
    dist.barrier()
    state = fresh(mesh, filled=False)
    _, step = restored(state)
    found += [step, is_whole(state)]
    dist.barrier()
[metadata] = Path(os.environ["TEST_STORAGE"]).rglob(".metadata")
other = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "tp"))
state = fresh(other, filled=False)
load(state, checkpoint_id=metadata.parent)
found += [state["step"], is_whole(state)]
# One write: the ranks share the pipe.
os.write(1, f"rank {dist.get_rank()}: {found}\n".encode())
dist.barrier()
dist.destroy_process_group()
