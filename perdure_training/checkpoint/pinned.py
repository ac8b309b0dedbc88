"""Pins snapshots in main memory, so that a GPU copies into them by itself.

Into memory that is not pinned the driver copies through a buffer of its own, with one core, which takes several times
as long. A snapshot is on tmpfs and stays in memory anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
from typing import Any, cast

import torch

from perdure_training.snapshots.arena import Mapping

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""`cudaHostRegisterPortable`: for all GPUs of this process."""

_refused = False


def pin(room: memoryview) -> None:
    """Pins the mapping that the room is a part of until it ends. Where the driver refuses, copies only take longer."""
    global _refused
    mapping = room.obj
    if _refused or not isinstance(mapping, Mapping) or mapping.before_end is not None:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    code = int(cast("Any", torch.cuda).cudart().cudaHostRegister(address, len(mapping), _PORTABLE))
    if code == 0:
        mapping.before_end = functools.partial(_unpin, address, os.getpid())
        return
    _refused = True
    logger.warning("perdure: snapshots are saved more slowly: CUDA pins no memory here (error %d)", code)
    # CUDA would report the refusal to the next kernel of the training.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unpin(address: int, pid: int) -> None:
    # A process that ends, or that was forked, has no driver to tell.
    if not sys.is_finalizing() and os.getpid() == pid:
        cast("Any", torch.cuda).cudart().cudaHostUnregister(address)
