"""Fails with a text that is not valid UTF-8, like the name of a file in a data set may be."""

import os

import torch

torch.zeros(1)
name = os.fsdecode(b"caf\xe9.jpg")
raise ValueError(f"{name} is no image")
