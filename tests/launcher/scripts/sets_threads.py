"""Sets a variable that torch reads, before it imports torch."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

print(torch.get_num_threads())
