"""Sets what torch reads before it imports it, in itself or in a child, and prints what it is at its beginning."""

import os
import sys

if "in-a-child" not in sys.argv:
    print(f"{os.getpid()} RANK {os.environ['RANK']} {os.environ.get('OMP_NUM_THREADS')} {os.getcwd()}")
    os.chdir("/")
    os.environ.update(OMP_NUM_THREADS="2")
elif os.fork() == 0:
    os.environ.update(OMP_NUM_THREADS="2")
    import torch

    os._exit(0)
else:
    os.wait()

import torch

torch.zeros(1)
sys.exit(3)
