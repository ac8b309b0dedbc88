"""Copies the node's log to object storage if the job requests it: to `outputs.logs`, or to its archive."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError
from pydantic_core import to_json

from perdure.agent.files import KeptFile, LogFile, log_files
from perdure.agent.log_reader import printed_times
from perdure.agent.parts import PartsCopier, Position, Shipper, Storage
from perdure.contract.identity import NodeCredentials
from perdure.contract.logs import PART_TIMES
from perdure.spec.timing import Timing
from perdure_training.node_api.layout import SHIPPED_LOGS

_PART_MAX = 4 * 1024 * 1024

FIRST_PARTS, LAST_PARTS = 4, 60
"""Parts that an archive keeps of a node's log: 16 MiB of its beginning, where it starts, and the last 240 MiB."""


class LogShipper(Shipper):
    """Copies one node's log into `<url>/<role>-<rank>/<incarnation>/part-NNNNNN.log`, and the times of its lines into
    `part-NNNNNN.times` beside each part."""

    def __init__(
        self,
        run_dir: Path,
        url: str,
        node: NodeCredentials,
        *,
        private_dir: Path | None = None,
        part_max: int = _PART_MAX,
        file_max: int = Timing().processes.log_max_bytes,
        keep_all: bool = True,
    ) -> None:
        """Begins where an earlier agent ended.

        Args:
            run_dir: The node's run directory.
            url: The folder of all nodes' logs, as fsspec takes it.
            node: The node.
            private_dir: Holds how far the log is copied; by default the run directory.
            part_max: Bytes of a part.
            file_max: Bytes of one file of the log, at most. The launcher writes no larger ones; training code could put
                a file without end in their place.
            keep_all: Keep all parts, and not only the first and the last ones.
        """
        # A folder of its own is what the agent has where it is another user.
        contained = private_dir not in (None, run_dir)
        super().__init__(
            Storage(url, f"{node.role}-{node.rank}/{node.incarnation}", contained=contained), what="the log"
        )
        self._run_dir = run_dir
        self._file = KeptFile((private_dir or run_dir) / SHIPPED_LOGS)
        self._copier = PartsCopier[LogFile](
            self._storage,
            suffix="log",
            position=self._read_position(),
            keep=self._keep_position,
            part_max=part_max,
            file_max=file_max,
            kept=None if keep_all else (FIRST_PARTS, LAST_PARTS),
            beside={PART_TIMES: _times_of},
        )

    def _ship(self) -> None:
        self._copier.copy(log_files(self._run_dir))

    def _keep_position(self, position: Position) -> None:
        self._file.write(position.model_dump_json().encode())

    def _read_position(self) -> Position:
        try:
            return Position.model_validate_json(self._file.read() or b"{}")
        except ValidationError:
            return Position()


def _times_of(file: LogFile, begin: int, part: bytes) -> bytes:
    times = printed_times(file, begin, part)
    return to_json(times) if times else b""
