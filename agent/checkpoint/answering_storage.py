"""Reads the storage for ranks, within bounded time: a call to a network file system whose server is gone never
returns."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from perdure.agent.checkpoint.further_tries import FurtherTries
from perdure.agent.checkpoint.storage import Storage
from perdure.contract.checkpoints import CheckpointRef

_WITHIN = 60.0
"""Seconds in which the storage must answer one call, or give the next piece of a file."""

_TO_THE_END = 1 << 62

T = TypeVar("T")


class AnsweringStorage(Storage):
    """The storage, whose reads fail where it hangs.

    Invariant: a storage that hangs keeps those threads that were reading when it began to, and one more now and then:
    later reads fail at once, until one of these calls returns.
    """

    def __init__(self, url: str, *, contained: bool = False) -> None:
        super().__init__(url, contained=contained)
        self._lock = threading.Lock()
        self._hanging: dict[Future[Any], str] = {}
        """The calls that have not returned in time, with what each reads."""
        self._tries = FurtherTries()

    def read(self, path: str) -> bytes:
        read = super().read
        return self._within(path, lambda: read(path))

    def pieces(self, path: str, *, offset: int, length: int, piece: int) -> Iterator[bytes]:
        pieces = super().pieces(path, offset=offset, length=length, piece=piece)
        while content := self._within(path, lambda: next(pieces, b"")):
            yield content

    def size(self, path: str) -> int:
        size = super().size
        return self._within(path, lambda: size(path))

    def checksum(self, path: str, *, piece: int) -> tuple[int, int]:
        size = checksum = 0
        for content in self.pieces(path, offset=0, length=_TO_THE_END, piece=piece):
            size += len(content)
            checksum = zlib.crc32(content, checksum)
        return size, checksum

    def names(self, folder: str) -> set[str]:
        names = super().names
        return self._within(folder, lambda: names(folder))

    def sizes(self, folder: str) -> dict[str, int | None]:
        sizes = super().sizes
        return self._within(folder, lambda: sizes(folder))

    def is_committed(self, saved: CheckpointRef) -> bool:
        is_committed = super().is_committed
        return self._within(saved.folder, lambda: is_committed(saved))

    def _within(self, path: str, call: Callable[[], T]) -> T:
        """Calls the storage in a thread of its own.

        Raises:
            OSError: if it does not answer, or an earlier call has not returned.
        """
        with self._lock:
            hangs_at = next(iter(self._hanging.values()), None)
            tries = hangs_at is not None and self._tries.is_due()
        if hangs_at is not None and not tries:
            raise self._hangs(hangs_at)
        answer: Future[T] = Future()
        threading.Thread(target=self._call, args=(call, answer, tries), name="storage-read", daemon=True).start()
        try:
            return answer.result(_WITHIN)
        except TimeoutError:
            with self._lock:
                if not answer.done():
                    self._hanging[answer] = path
                    self._tries.is_due()
            if answer.done():
                # Just in time, or the storage's own error.
                return answer.result()
            raise self._hangs(path) from None

    def _call(self, call: Callable[[], T], answer: Future[T], tries: bool) -> None:
        try:
            result = call()
        except BaseException as error:
            with self._lock:
                self._forget(answer, tries=tries)
                answer.set_exception(error)
        else:
            with self._lock:
                self._forget(answer, tries=tries)
                answer.set_result(result)

    def _forget(self, answer: Future[Any], *, tries: bool) -> None:
        """Records that a call has returned; `tries` of one that began while others hung, which may hang for good. The
        next try is as late then as after another that hangs: a storage may answer some calls and not others."""
        self._hanging.pop(answer, None)
        if tries:
            self._hanging.clear()
        elif not self._hanging:
            self._tries.reset()

    def _hangs(self, path: str) -> OSError:
        return OSError(
            f"{self.url} hangs: it has given nothing of {path} for {_WITHIN:g} s. See on this node whether its server "
            "is reached, and mount it again"
        )
