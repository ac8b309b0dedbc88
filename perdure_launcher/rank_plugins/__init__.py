"""Plugins that `import torch` loads in every rank: they count steps and report progress."""
