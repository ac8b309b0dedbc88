"""Names in a job's storage for checkpoints.

    <storage>/[stage-N/][NAME/]step-STEP-RUN-GENERATION/
        __R_0.distcp            the data of rank R
        perdure-N.json          sizes and checksums of the files of node N
        metadata.uncommitted    what becomes .metadata when the checkpoint is committed
        .metadata               makes the folder a checkpoint of torch.distributed.checkpoint

The run and the generation are part of a folder's name, so that two generations, and two runs of a job, never write the
same file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

METADATA: Final = ".metadata"
UNCOMMITTED: Final = "metadata.uncommitted"

_PLACE = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(?:/[A-Za-z0-9][A-Za-z0-9_.-]{0,63})?)?")
_FOLDER = re.compile(r"step-(\d{1,18})-([A-Za-z0-9_.-]{1,64})-(\d{1,18})")
_FILE = re.compile(r"__\d{1,9}_0\.distcp|\.metadata")
_RECORD = re.compile(r"perdure-\d{1,9}\.json")


@dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint's folder; a later one is greater."""

    step: int
    generation: int
    run: str
    place: str
    """The folder of the checkpointer's and the stage's checkpoints, within the storage."""

    @property
    def folder(self) -> str:
        """The path within the storage."""
        name = f"step-{self.step}-{self.run}-{self.generation}"
        return f"{self.place}/{name}" if self.place else name


def read_folder(text: str) -> Saved:
    """Reads the path of a checkpoint's folder.

    Raises:
        ValueError: if it is none. User code names folders, and must not lead the agent out of the storage.
    """
    place, _, name = text.rpartition("/")
    match = _FOLDER.fullmatch(name)
    if match is None or not _PLACE.fullmatch(place):
        raise ValueError(f"folder: expected step-STEP-RUN-GENERATION, found {text[:120]!r}")
    return Saved(step=int(match[1]), run=match[2], generation=int(match[3]), place=place)


def check_place(text: str) -> str:
    """Returns the path of a folder of checkpoints.

    Raises:
        ValueError: if it leads out of the storage.
    """
    if not _PLACE.fullmatch(text):
        raise ValueError(f"place: expected up to two names, found {text[:120]!r}")
    return text


def check_file(text: str) -> str:
    """Returns the name of a file that ranks may read or write.

    Raises:
        ValueError: if it is none.
    """
    if not _FILE.fullmatch(text):
        raise ValueError(f"name: expected __RANK_0.distcp or {METADATA}, found {text[:120]!r}")
    return text


def part_name(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"__{rank}_0.distcp"


def record_name(first_rank: int) -> str:
    """Returns the name of a node's record, by its first rank."""
    return f"perdure-{first_rank}.json"


def is_record(name: str) -> bool:
    """Whether a file is a node's record."""
    return _RECORD.fullmatch(name) is not None
