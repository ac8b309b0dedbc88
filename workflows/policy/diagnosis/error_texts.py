"""Recognizes what the error texts of torch and Python mean: who failed, and who only noticed that another one did.

torch gives its errors no codes, so their texts are all there is. Each pattern lists texts of torch's own sources, of
all releases that Perdure supports.
"""

from __future__ import annotations

import re

_COLLECTIVE_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms for (recv|send) operation|application timeout caused pair closure"
    r"|watchdog caught collective operation timeout|processgroupnccl's watchdog got stuck"
    r"|failed to pass monitoredbarrier|timed out in monitoredbarrier|collective operation timed? ?out"
    r"|(runtimeerror|diststoreerror): (socket timeout|wait timeout|barrier timeout|operation timed out)"
    r"|wait timeout after \d+ ?ms, keys?:|barrier timeout after \d+ ?ms, keys?:"
    r"|timed out after \d+ seconds waiting for clients",
    re.IGNORECASE,
)
"""A rank waited for another one in a collective, or for its key in a store, until the time was over. Nothing broke: the
other one is alive, and does not come."""

_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed"
    r"|remote (process|peer) (exited|closed)|connectfullmesh|gloo.*(timed out|timeout|recvbuf|transport)"
    r"|nccl.*(remote error|watchdog|aborted|timeout)|watchdog (caught|got)|processgroupnccl.*(abort|timeout)"
    r"|distnetworkerror|diststoreerror|heartbeat.*timed? ?out",
    re.IGNORECASE | re.DOTALL,
)
"""Errors of torch's gloo and NCCL backends and of its stores after another process has gone."""

_UNEQUAL = re.compile(r"enforce fail at .*gloo.* vs ", re.IGNORECASE | re.DOTALL)
"""gloo's error when ranks bring tensors of different sizes to one collective, which is the script's own fault."""

_OUT_OF_MEMORY = re.compile(r"out of memory|outofmemoryerror|cannot allocate memory|\bmemoryerror\b", re.IGNORECASE)

_CHILD_LOST = re.compile(
    r"dataloader worker \(pid\S* [\d, ]+\) (is killed by signal: killed|exited unexpectedly)"
    r"|process in the process pool was terminated abruptly",
    re.IGNORECASE,
)
"""Errors of a rank after a child that it works with was killed: a worker of torch's DataLoader, or of a pool of
Python's. The child's signal is not in all of them."""

_DEVICE_FAULT = re.compile(
    r"device-side assert|illegal memory access|illegal instruction was encountered|misaligned address"
    r"|unspecified launch failure|invalid program counter|operation not supported on global/shared address space"
    r"|uncorrectable (ecc|nvlink) error|hardware stack error",
    re.IGNORECASE,
)
"""CUDA's errors of a kernel that had started, after which the process cannot use the GPU. Whatever call comes next
reports them, also the watchdog of NCCL, which is not their cause."""

_CANNOT_RUN = re.compile(
    r"(builtins\.)?(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|TabError|NameError|UnboundLocalError"
    r"|AttributeError|TypeError|FileNotFoundError|NotADirectoryError|IsADirectoryError)\b"
)
"""Python's errors about the program itself and what it needs, by the name with which an error begins. Before the first
step they are no matter of data or luck."""


def cannot_run(text: str) -> bool:
    """Whether the program itself is wrong, or something that it needs is missing."""
    return _CANNOT_RUN.match(text) is not None


def is_out_of_memory(text: str) -> bool:
    """Whether memory of the host or of a device ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


def is_child_lost(text: str) -> bool:
    """Whether a child of a rank ended without a result, which a kill explains."""
    return _CHILD_LOST.search(text) is not None


def is_device_fault(text: str) -> bool:
    """Whether a kernel failed on a GPU."""
    return _DEVICE_FAULT.search(text) is not None


def is_collective_timeout(text: str) -> bool:
    """Whether a rank waited for another one until its timeout was over."""
    return _COLLECTIVE_TIMEOUT.search(text) is not None


def is_peer_lost(text: str) -> bool:
    """Whether a connection to another process broke, which is the effect of that one's end."""
    return _PEER_LOST.search(text) is not None and _UNEQUAL.search(text) is None
