"""Names in a job's storage for checkpoints.

    <storage>/[stage-N/][NAME/]step-STEP-RUN-GENERATION/
        __R_0.distcp            the data of rank R
        perdure-N.json          sizes and checksums of the files of node N
        metadata.uncommitted    what becomes .metadata when the checkpoint is committed
        .metadata               makes the folder a checkpoint of torch.distributed.checkpoint

The run and the generation are part of a folder's name, so that two generations, and two runs of a job, never write the
same file: `CheckpointRef` has its parts.
"""

from __future__ import annotations

import re
from typing import Final

from perdure.contract.checkpoints import PLACE

METADATA: Final = ".metadata"
UNCOMMITTED: Final = "metadata.uncommitted"

_FILE = re.compile(r"__\d{1,9}_0\.distcp|\.metadata")
_RECORD = re.compile(r"perdure-\d{1,9}\.json")


def check_place(text: str) -> str:
    """Returns the path of a folder of checkpoints.

    Raises:
        ValueError: if it leads out of the storage.
    """
    if not re.fullmatch(PLACE, text):
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
