"""Recognizes what the error texts of torch and Python mean: who failed, and who only noticed that another one did.

torch gives its errors no codes, so their texts are all there is. Each pattern lists texts of torch's own sources, of
all releases that Perdure supports.

A rank may write errors that are made to keep everyone's worker busy. Their classification therefore takes time that is
linear in a bounded length: no pattern repeats anything without a bound, what may stand anywhere behind something else
is searched with `str.find`, and each text is classified once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache

_LONGEST = 4_096
"""Characters of a text that count: as many as messages carry of an error."""

_REMEMBERED = 256
"""Texts whose classification is kept: those of one failure of a large group."""

_COLLECTIVE_TIMEOUT = re.compile(
    r"timed out waiting \d{1,20} ?ms for (recv|send) operation|application timeout caused pair closure"
    r"|watchdog caught collective operation timeout|processgroupnccl's watchdog got stuck"
    r"|failed to pass monitoredbarrier|timed out in monitoredbarrier|collective operation timed? ?out"
    r"|(runtimeerror|diststoreerror): (socket timeout|wait timeout|barrier timeout|operation timed out)"
    r"|wait timeout after \d{1,20} ?ms, keys?:|barrier timeout after \d{1,20} ?ms, keys?:"
    r"|timed out after \d{1,20} seconds waiting for clients",
    re.IGNORECASE,
)
"""A rank waited for another one in a collective, or for its key in a store, until the time was over. Nothing broke: the
other one is alive, and does not come."""

_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed"
    r"|remote (process|peer) (exited|closed)|connectfullmesh|watchdog (caught|got)|distnetworkerror|diststoreerror",
    re.IGNORECASE,
)
_PEER_LOST_IN_ORDER = (
    ("gloo", ("timed out", "timeout", "recvbuf", "transport")),
    ("nccl", ("remote error", "watchdog", "aborted", "timeout")),
    ("processgroupnccl", ("abort",)),
    ("heartbeat", ("timeout", "timed out", "time out", "timedout")),
)
"""Errors of torch's gloo and NCCL backends and of its stores after another process has gone: with the pattern, texts
with a word and one of others anywhere behind it."""

_UNEQUAL_IN_ORDER = ("enforce fail at ", "gloo", " vs ")
"""gloo's error when ranks bring tensors of different sizes to one collective, which is the script's own fault. The
receiver raises it, and it does not tell which of the two sizes is wrong."""

_OUT_OF_MEMORY = re.compile(r"out of memory|outofmemoryerror|cannot allocate memory|\bmemoryerror\b", re.IGNORECASE)

_OF_A_DEVICE = re.compile(r"\b(cuda|hip|xpu|mps|gpu|nccl|torch\.outofmemoryerror)\b|^outofmemoryerror", re.IGNORECASE)
"""Names in errors about the memory of an accelerator; `torch.OutOfMemoryError` is raised for no other memory."""

_CHILD_LOST = re.compile(
    r"dataloader worker \(pid\S{0,8} [\d, ]{1,200}\) (is killed by signal: killed|exited unexpectedly)"
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
    r"gpu is lost|fallen off the bus|\bxid:?\s{0,4}(\(pci:[^)]{0,40}\):?)?\s{0,4}(48|62|64|74|79|95|119|120)\b",
    re.IGNORECASE,
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
    r"^([\w.]{1,100}\.)?(gaierror|URLError|ProxyError|ConnectTimeout(Error)?|ReadTimeout(Error)?|ConnectError"
    r"|ChunkedEncodingError|IncompleteRead|RemoteDisconnected|RemoteProtocolError|MaxRetryError|NewConnectionError"
    r"|NameResolutionError|EndpointConnectionError|ConnectionClosedError|Client\w{0,40}ConnectorError"
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


class Sign(Enum):
    """What a text says."""

    CANNOT_RUN = auto()
    OUT_OF_MEMORY = auto()
    OF_A_DEVICE = auto()
    HARDWARE = auto()
    DEVICE_MISSING = auto()
    STORAGE = auto()
    NETWORK = auto()
    CHILD_LOST = auto()
    DEVICE_FAULT = auto()
    COLLECTIVE_TIMEOUT = auto()
    UNEQUAL = auto()
    PEER_LOST = auto()


def _in_order(lowered: str, *words: str) -> bool:
    """Whether the words stand in a text one after the other, with anything between them."""
    position = 0
    for word in words:
        found = lowered.find(word, position)
        if found < 0:
            return False
        position = found + len(word)
    return True


def _is_unequal(text: str) -> bool:
    return _in_order(text.lower(), *_UNEQUAL_IN_ORDER)


def _is_peer_lost(text: str) -> bool:
    lowered = text.lower()
    in_order = any(_in_order(lowered, first, then) for first, others in _PEER_LOST_IN_ORDER for then in others)
    return (in_order or _PEER_LOST.search(text) is not None) and not _is_unequal(text)


_SIGNS: dict[Sign, Callable[[str], object]] = {
    Sign.CANNOT_RUN: _CANNOT_RUN.match,
    Sign.OUT_OF_MEMORY: _OUT_OF_MEMORY.search,
    Sign.OF_A_DEVICE: _OF_A_DEVICE.search,
    Sign.HARDWARE: _HARDWARE.search,
    Sign.DEVICE_MISSING: _DEVICE_MISSING.search,
    Sign.STORAGE: _STORAGE.search,
    Sign.NETWORK: _NETWORK.search,
    Sign.CHILD_LOST: _CHILD_LOST.search,
    Sign.DEVICE_FAULT: _DEVICE_FAULT.search,
    Sign.COLLECTIVE_TIMEOUT: _COLLECTIVE_TIMEOUT.search,
    Sign.UNEQUAL: _is_unequal,
    Sign.PEER_LOST: _is_peer_lost,
}


def signs(text: str) -> frozenset[Sign]:
    """Returns everything that an error's text says, of its first characters."""
    return _signs(text[:_LONGEST])


@lru_cache(_REMEMBERED)
def _signs(text: str) -> frozenset[Sign]:
    return frozenset(sign for sign, fits in _SIGNS.items() if fits(text))


def cannot_run(text: str) -> bool:
    """Whether the program itself is wrong, or something that it needs is missing."""
    return Sign.CANNOT_RUN in signs(text)


def is_out_of_memory(text: str) -> bool:
    """Whether memory of the host or of a device ran out."""
    return Sign.OUT_OF_MEMORY in signs(text)


def is_of_a_device(text: str) -> bool:
    """Whether the memory that ran out is that of an accelerator."""
    return Sign.OF_A_DEVICE in signs(text)


def is_hardware(text: str) -> bool:
    """Whether a GPU has failed for good, whatever runs on it."""
    return Sign.HARDWARE in signs(text)


def is_device_missing(text: str) -> bool:
    """Whether a process found no GPU that it can use."""
    return Sign.DEVICE_MISSING in signs(text)


def is_storage(text: str) -> bool:
    """Whether a disk, a mount or an object store could not be used."""
    return Sign.STORAGE in signs(text)


def is_network(text: str) -> bool:
    """Whether a server outside of the job could not be reached, or could not answer."""
    return Sign.NETWORK in signs(text)


def is_child_lost(text: str) -> bool:
    """Whether a child of a rank ended without a result, which a kill explains."""
    return Sign.CHILD_LOST in signs(text)


def is_device_fault(text: str) -> bool:
    """Whether a kernel failed on a GPU."""
    return Sign.DEVICE_FAULT in signs(text)


def is_collective_timeout(text: str) -> bool:
    """Whether a rank waited for another one until its timeout was over."""
    return Sign.COLLECTIVE_TIMEOUT in signs(text)


def is_unequal(text: str) -> bool:
    """Whether ranks brought tensors of different sizes to one collective."""
    return Sign.UNEQUAL in signs(text)


def is_peer_lost(text: str) -> bool:
    """Whether a connection to another process broke, which is the effect of that one's end."""
    return Sign.PEER_LOST in signs(text)
