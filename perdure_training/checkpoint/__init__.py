"""Checkpoints in the memory of the nodes: after a failure the ranks continue with the step that they had.

    from perdure_training.checkpoint import Checkpointer, Generators

    checkpointer = Checkpointer()
    state = {"model": model, "optimizer": optimizer, "generators": Generators(), "step": 0}
    checkpointer.restore(state)
    while state["step"] < total:
        train_step()
        state["step"] += 1
        checkpointer.save(state["step"], state)

It does nothing in a process that Perdure did not start, so that a script runs unchanged elsewhere. It replaces no
checkpoint on disk: memory is lost with the last node.
"""

from perdure_training.checkpoint.checkpointer import Checkpointer
from perdure_training.checkpoint.dcp import MemoryReader, MemoryWriter, dcp_writer
from perdure_training.checkpoint.generators import Generators

__all__ = ["Checkpointer", "Generators", "MemoryReader", "MemoryWriter", "dcp_writer"]
