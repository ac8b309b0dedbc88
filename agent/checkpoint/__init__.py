"""Durable checkpoints: copies the ranks' snapshots to the job's storage, reads them back, and commits them.

The bytes are those of `torch.distributed.checkpoint`; the ranks say where in their snapshots they are, so that nothing
here needs torch.
"""
