"""What a node has stored of the newest checkpoints. It is kept in a file: of a checkpoint whose agent is started again
between two ranks' parts, the next agent stores only the parts that are left."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from perdure.agent.checkpoint.names import METADATA
from perdure.agent.checkpoint.records import FileRecord
from perdure.agent.files import KeptFile
from perdure_training.node_api.layout import CHECKPOINT_PROGRESS

logger = logging.getLogger(__name__)


class UploadState(BaseModel):
    """What is known of one checkpoint on this node."""

    begun: float
    """The monotonic time of the first request."""
    parts: dict[str, FileRecord] = Field(default={})
    answers: int = 0
    """The newest request for a checkpoint that it answers."""
    beside: tuple[str, ...] = ()
    """As in `PartRequest`: those that any rank has named."""
    reported: int | None = None
    """As in `PartRequest`: the highest of its ranks'."""
    metrics: dict[str, float] = {}
    """What the script measured at its step."""
    committed: bool = False
    given_up: str = ""
    problem: str = ""
    """The problem that was reported last."""

    @property
    def size(self) -> int:
        """The bytes of the ranks' parts."""
        return sum(record.size for name, record in self.parts.items() if name != METADATA)


_CONTENT = TypeAdapter(dict[str, UploadState])


class UploadStateFile:
    """The file, in the node's run directory."""

    def __init__(self, run_directory: Path) -> None:
        """Creates the object.

        Args:
            run_directory: The folder of the node.
        """
        self._file = KeptFile(run_directory / CHECKPOINT_PROGRESS)

    def read(self) -> dict[str, UploadState]:
        """Returns the states by folder; none where nothing usable is kept."""
        content = self._file.read()
        if content is None:
            return {}
        try:
            return _CONTENT.validate_json(content)
        except ValidationError as error:
            logger.warning("what was stored of checkpoints is not known any more: %s", error)
            return {}

    def write(self, states: Mapping[str, UploadState]) -> None:
        """Replaces the content. An error is logged."""
        self._file.write(_CONTENT.dump_json(dict(states)))
