"""Snapshots of the training state in the memory of the node, where they outlive the ranks that wrote them.

Standard library only: `perdure_training.checkpoint` fills them from PyTorch, and reads them.
"""
