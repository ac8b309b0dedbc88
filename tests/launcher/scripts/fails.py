"""Fails at once, as a script with a typo does."""

import torch

settings = {"learning_rate": torch.tensor(0.1)}
raise ValueError(f"unknown optimizer 'adamm'; known: {sorted(settings)}")
