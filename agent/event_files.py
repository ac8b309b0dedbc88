"""Copies the event files of a node to the job's archive."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import RootModel, ValidationError

from perdure.agent.files import KeptFile, RotatedFile, event_files
from perdure.agent.parts import PartsCopier, Position, Shipper, Storage
from perdure.contract.identity import NodeCredentials
from perdure_training.events.files import MAX_BYTES
from perdure_training.node_api.layout import SHIPPED_EVENTS

_PART_MAX: Final = 1024 * 1024
_FILE_MAX: Final = 2 * MAX_BYTES
"""Bytes of one file, at most: several processes may exceed its limit a little, and training code without end."""
_KEPT: Final = (1, 32)
"""Parts of a file that are kept: 1 MiB of its beginning and the last 32 MiB, as much as a node keeps."""


class _Positions(RootModel[dict[str, Position]]):
    root: dict[str, Position] = {}


class EventShipper(Shipper):
    """Copies each event file of a node into `<url>/<role>-<rank>/<incarnation>/<name>/part-NNNNNN.jsonl`."""

    def __init__(
        self,
        run_dir: Path,
        url: str,
        node: NodeCredentials,
        *,
        private_dir: Path | None = None,
        part_max: int = _PART_MAX,
    ) -> None:
        """Begins where an earlier agent ended.

        Args:
            run_dir: The node's run directory, in which training code and torchrun write.
            url: The folder of all nodes' events, as fsspec takes it.
            node: The node.
            private_dir: The folder in which the agent writes its own, and how far they are copied; by default the run
                directory.
            part_max: Bytes of a part.
        """
        contained = private_dir not in (None, run_dir)
        super().__init__(
            Storage(url, f"{node.role}-{node.rank}/{node.incarnation}", contained=contained), what="an event file"
        )
        self._folders = (run_dir, private_dir or run_dir)
        self._part_max = part_max
        self._file = KeptFile(self._folders[-1] / SHIPPED_EVENTS)
        self._positions = self._read_positions()
        self._copiers: dict[str, PartsCopier[RotatedFile]] = {}

    def _ship(self) -> None:
        # Training code has no way to a file of the agent's name.
        found = {name: files for folder in self._folders for name, files in event_files(folder).items()}
        for name, files in found.items():
            if name not in self._copiers:
                self._copiers[name] = self._copier(name)
            self._copiers[name].copy(files)

    def _copier(self, name: str) -> PartsCopier[RotatedFile]:
        def keep(position: Position) -> None:
            self._positions[name] = position
            self._file.write(_Positions(self._positions).model_dump_json().encode())

        return PartsCopier(
            self._storage,
            suffix="jsonl",
            position=self._positions.get(name, Position()),
            keep=keep,
            part_max=self._part_max,
            file_max=_FILE_MAX,
            kept=_KEPT,
            folder=name.removesuffix(".jsonl"),
        )

    def _read_positions(self) -> dict[str, Position]:
        try:
            return _Positions.model_validate_json(self._file.read() or b"{}").root
        except ValidationError:
            return {}
