"""Fails with a text that is no UTF-8, as where a file of a data set has such a name."""

import os

import torch

torch.zeros(1)
name = os.fsdecode(b"caf\xe9.jpg")
raise ValueError(f"{name} is no image")
