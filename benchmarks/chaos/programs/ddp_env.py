"""Fault-tolerant DDP as PyTorch's tutorials write it: an `env://` process group, and a snapshot each epoch."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PACE = float(os.environ.get("STEP_SECONDS", "0.05"))
"""Seconds of sleep per step, which simulate the compute of a larger model."""


def load_data() -> TensorDataset:
    torch.manual_seed(1)
    inputs = torch.randn(256, 20)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def save(snapshot: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    partial = snapshot.with_suffix(".partial")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, partial)
    os.replace(partial, snapshot)


def main(out: Path, epochs: int, start_from: Path | None = None) -> None:
    dist.init_process_group("gloo")
    snapshot = out / "snapshot.pt"
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    if start_from is not None:
        model.load_state_dict(torch.load(start_from)["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    begin = 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["epoch"]
        print(f"resuming at epoch {begin}", flush=True)
    wrapped = DistributedDataParallel(model)
    data = load_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    loss = torch.zeros(())
    for epoch in range(begin, epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(wrapped(inputs), targets)
            loss.backward()
            optimizer.step()
            time.sleep(PACE)
        if dist.get_rank() == 0:
            save(snapshot, wrapped, optimizer, epoch + 1)
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
