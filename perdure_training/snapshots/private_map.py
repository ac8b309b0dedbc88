"""The bytes of a snapshot as memory of this process, without a copy: the kernel copies a page when it is first written.

Most of a restore's time is the first touch of new memory. A script that moves its state to a GPU needs none of it, and
one that trains on the processor writes its state step by step.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from pathlib import Path

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14: copies the pages of a private mapping, and changes nothing in them."""
_AT_ONCE = 1 << 24
"""Bytes that are copied by one call."""


class PrivateMap:
    """A private mapping of a file.

    Invariants:
        - What is written into the pieces does not change the file.
        - Once `detach` has returned, a change of the file does not change the pieces. Until then the file must stay as
          it is: a page that was not written yet is the file's.
    """

    def __init__(self, path: Path) -> None:
        """Maps a file, or reads it where the system cannot copy the pages of a mapping on request.

        Raises:
            OSError: if it cannot be read.
        """
        self._pieces: list[tuple[weakref.ref[memoryview], int, int]] = []
        with path.open("rb") as file:
            self._is_file = _copies_on_request()
            if self._is_file:
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=protection)
            else:
                self._map = mmap.mmap(-1, max(os.fstat(file.fileno()).st_size, 1))
                file.readinto(self._map)

    def piece(self, offset: int, size: int) -> memoryview:
        """Returns a part of the file's bytes, which can be written. The memory lives as long as what uses it."""
        view = memoryview(self._map)[offset : offset + size]
        self._pieces.append((weakref.ref(view), offset, size))
        return view

    def detach(self) -> None:
        """Copies the pages of the pieces that are still in use. Other threads may read and write them meanwhile.

        Raises:
            OSError: if there is no memory for them.
        """
        pieces, self._pieces = self._pieces, []
        if not self._is_file:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for reference, offset, size in pieces:
            first = offset - offset % mmap.PAGESIZE
            for start in range(first, offset + size, _AT_ONCE):
                # Keeps the piece while its pages are copied.
                view = reference()
                if view is None:
                    break
                _advise(address + start, min(_AT_ONCE, offset + size - start), _POPULATE_WRITE)


def _copies_on_request() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        # Linux looks at the advice before the length.
        _advise(0, 0, _POPULATE_WRITE)
    except OSError:
        return False
    return True


def _advise(address: int, length: int, advice: int) -> None:
    # `mmap.madvise` keeps other threads of Python from running.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
