"""Files by which a user's request to replay a step reaches the ranks of a node, and by which each of them answers.

A rank whose script can replay steps has such a file before the first request, so that the agent can tell the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from perdure_training.node_api.corruption_file import GRADIENTS, PARAMETERS
from perdure_training.node_api.layout import REPLAY_REQUEST
from perdure_training.node_api.text import well_formed
from perdure_training.node_api.untrusted_files import replace_beneath
from perdure_training.node_api.untrusted_json import finite, is_whole, read_json_below

_LONGEST = 4096
"""Bytes that are read: any program may write to the files."""
LARGEST_REQUEST = 2**53
_LONGEST_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class ReplayAnswer:
    """What a rank has found when it last replayed a step for a user."""

    request: int = 0
    """The request; 0 before the first one."""
    step: int = 0
    compared: str = ""
    """What all ranks have compared: `gradients`, or `parameters` alone."""
    checksum: str = ""
    """The rank's own."""
    problem: str = ""
    """Why nothing was compared, or what differs; empty where all ranks agree."""
    seconds: float = 0.0


def write_request(run_directory: Path, request: int, *, generation: int) -> None:
    """Asks the ranks of a generation to replay their next step.

    Raises:
        OSError: if the file cannot be written.
    """
    content = json.dumps({"generation": generation, "request": request})
    replace_beneath(run_directory, REPLAY_REQUEST, content.encode())


def read_request(run_directory: Path, *, generation: int) -> int:
    """Returns the newest request to the ranks of a generation; 0 for none."""
    try:
        content = json.loads((run_directory / REPLAY_REQUEST).read_bytes()[:_LONGEST])
        request = content["request"] if content["generation"] == generation else 0
        return request if is_whole(request) else 0
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def answer_path(directory: Path, rank: int) -> Path:
    """Returns the path of a global rank's file, in the folder of progress files."""
    return directory / f"rank-{rank}.replay"


def write_answer(path: Path, answer: ReplayAnswer, *, generation: int) -> None:
    """Replaces the file.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".replay-draft")
    draft.write_text(json.dumps({"generation": generation, "answer": asdict(answer)}), encoding="utf-8")
    draft.replace(path)


def read_answer(path: Path, *, generation: int, beneath: Path) -> ReplayAnswer | None:
    """Reads the newest answer of a rank in a generation; None if it can replay nothing, or the file is malformed.

    Args:
        path: The file.
        generation: The generation; the file of an older one stays.
        beneath: The folder below which no link is followed.
    """
    try:
        content = read_json_below(beneath, path, limit=_LONGEST)
        answer = content["answer"]
        known = content["generation"] == generation and all(is_whole(answer[key]) for key in ("request", "step"))
        if not known or answer["compared"] not in ("", GRADIENTS, PARAMETERS):
            return None
        return ReplayAnswer(
            request=answer["request"],
            step=answer["step"],
            compared=answer["compared"],
            checksum=well_formed(str(answer["checksum"])[:_LONGEST_TEXT]),
            problem=well_formed(str(answer["problem"])[:_LONGEST_TEXT]),
            seconds=finite(answer["seconds"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
