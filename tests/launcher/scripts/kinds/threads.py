"""Threads and processes of the script's own: intra-op threads, a background thread, multiprocessing by spawn."""

import multiprocessing
import threading

import torch
import torch.distributed as dist


def square(number: int) -> int:
    return int((torch.ones(number) * number).sum().item())


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(4)
    beats = threading.Event()
    threading.Thread(target=beats.wait, daemon=True).start()
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        while True:
            assert pool.map(square, [2, 3]) == [4, 9]
            optimizer.zero_grad()
            (weight @ torch.randn(512, 512)).sum().backward()
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            optimizer.step()


if __name__ == "__main__":
    main()
