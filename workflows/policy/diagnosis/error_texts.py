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
"""gloo's error when ranks bring tensors of different sizes to one collective, which is the script's own fault. The
receiver raises it, and it does not tell which of the two sizes is wrong."""

_OUT_OF_MEMORY = re.compile(r"out of memory|outofmemoryerror|cannot allocate memory|\bmemoryerror\b", re.IGNORECASE)

_OF_A_DEVICE = re.compile(r"\b(cuda|hip|xpu|mps|gpu|nccl|torch\.outofmemoryerror)\b|^outofmemoryerror", re.IGNORECASE)
"""Names in errors about the memory of an accelerator; `torch.OutOfMemoryError` is raised for no other memory."""

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

_HARDWARE = re.compile(
    r"gpu is lost|fallen off the bus|\bxid:?\s*(\(pci:[^)]*\):?)?\s*(48|62|64|74|79|95|119|120)\b", re.IGNORECASE
)
"""Errors of a GPU that only a reset or a repair of its machine ends, as the driver (NVML) and NVIDIA's list of XIDs
describe them: 48 and 95 uncorrectable errors of its memory, 62 a halted micro-controller, 64 rows that cannot be
remapped, 74 a link, 79 a GPU that has fallen off the bus, 119 and 120 a system processor that does not answer."""

_DEVICE_MISSING = re.compile(
    r"no cuda gpus are available|no cuda-capable device is detected"
    r"|cuda-capable device\(s\) is/are busy or unavailable",
    re.IGNORECASE,
)
"""CUDA's errors of a process that finds no GPU which it can use."""

_STORAGE = re.compile(
    r"\[errno (5|28|30|107|116|121|122)\]|\(os error (5|28|30|107|116|121|122)\)|no space left on device"
    r"|disk quota exceeded|stale (nfs )?file handle|read-only file system|input/output error"
    r"|transport endpoint is not connected|pytorchstreamwriter failed writing|enforce fail at inline_container\.cc"
    r"|basic_ios::clear: iostream error"
    r"|an error occurred \((slowdown|internalerror|serviceunavailable|requesttimeout|50[0234])\)",
    re.IGNORECASE,
)
"""Errors of the system, of torch's file format and its streams in C++, and of S3's clients about a disk, a mount or an
object store."""

_NETWORK = re.compile(
    r"^([\w.]+\.)?(gaierror|URLError|ProxyError|ConnectTimeout(Error)?|ReadTimeout(Error)?|ConnectError"
    r"|ChunkedEncodingError|IncompleteRead|RemoteDisconnected|RemoteProtocolError|MaxRetryError|NewConnectionError"
    r"|NameResolutionError|EndpointConnectionError|ConnectionClosedError|Client\w*ConnectorError"
    r"|ServerDisconnectedError|LocalEntryNotFoundError)\b"
    r"|HTTPS?ConnectionPool|urlopen error|HTTP Error 50[0234]\b|\b50[0234] Server Error\b|\b429 Client Error\b"
)
"""Errors of Python's clients of HTTP and of name resolution, by the name with which an error begins, and by what they
say of a server."""

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


def is_of_a_device(text: str) -> bool:
    """Whether the memory that ran out is that of an accelerator."""
    return _OF_A_DEVICE.search(text) is not None


def is_hardware(text: str) -> bool:
    """Whether a GPU has failed for good, whatever runs on it."""
    return _HARDWARE.search(text) is not None


def is_device_missing(text: str) -> bool:
    """Whether a process found no GPU that it can use."""
    return _DEVICE_MISSING.search(text) is not None


def is_storage(text: str) -> bool:
    """Whether a disk, a mount or an object store could not be used."""
    return _STORAGE.search(text) is not None


def is_network(text: str) -> bool:
    """Whether a server outside of the job could not be reached, or could not answer."""
    return _NETWORK.search(text) is not None


def is_child_lost(text: str) -> bool:
    """Whether a child of a rank ended without a result, which a kill explains."""
    return _CHILD_LOST.search(text) is not None


def is_device_fault(text: str) -> bool:
    """Whether a kernel failed on a GPU."""
    return _DEVICE_FAULT.search(text) is not None


def is_collective_timeout(text: str) -> bool:
    """Whether a rank waited for another one until its timeout was over."""
    return _COLLECTIVE_TIMEOUT.search(text) is not None


def is_unequal(text: str) -> bool:
    """Whether ranks brought tensors of different sizes to one collective."""
    return _UNEQUAL.search(text) is not None


def is_peer_lost(text: str) -> bool:
    """Whether a connection to another process broke, which is the effect of that one's end."""
    return _PEER_LOST.search(text) is not None and not is_unequal(text)
