"""A compiled forward and backward pass: Dynamo, AOTAutograd and Inductor, with its pool of compilers."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
model = torch.compile(plain)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)  # pyrefly: ignore[bad-argument-type]
    optimizer.step()
