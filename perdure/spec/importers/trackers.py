"""Reads where an imported job resumes: the files in which DLRover, Megatron-LM and DeepSpeed name their newest
checkpoint.

    dlrover_latest.txt                      the step that DLRover has stored completely
    latest_checkpointed_iteration.txt       Megatron-LM's: the iteration, or `release`
    latest                                  DeepSpeed's: the tag, which is the folder's name

DLRover stores in the background, and its own file counts: a framework's may name a step that was never completed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 256
_DCP_DATA, _DCP_INDEX = ".distcp", ".metadata"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where a job resumes."""

    step: int | None
    """None where the tracker names no number, as Megatron-LM's `release`."""
    path: Path
    """The checkpoint."""
    tracker: Path
    """The file that names it."""


@dataclass(frozen=True, kw_only=True)
class Trackers:
    """What the tracker files of a folder say."""

    resume: Resume | None
    """None where no file names a checkpoint that is there."""
    problems: tuple[str, ...]
    """What is wrong with the files that do not count, for users."""


def read_trackers(folder: Path) -> Trackers:
    """Returns the checkpoint that the tracker files of a folder name.

    Args:
        folder: The folder that the job saves to.

    Raises:
        OSError: if the folder cannot be read.
    """
    names = sorted(path.name for path in folder.iterdir())
    resume: Resume | None = None
    problems: list[str] = []
    for name, find in _TRACKERS.items():
        if name not in names:
            continue
        try:
            found = _read(folder / name, names, find)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if resume is None:
            resume = found
        elif found.path != resume.path:
            problems.append(
                f"{name}: names {found.path.name}, and {resume.tracker.name} {resume.path.name}, which counts"
            )
    if resume is None and not problems:
        problems.append(f"no tracker file is there: expected {', '.join(_TRACKERS)}")
    return Trackers(resume=resume, problems=tuple(problems))


def _read(tracker: Path, names: list[str], find: Callable[[str, list[str]], str | None]) -> Resume:
    try:
        text = tracker.read_bytes()[: _LONGEST + 1].decode().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if not text or len(text) > _LONGEST or "/" in text:
        raise ValueError(f"names no checkpoint: {text[:40]!r}")
    name = find(text, names)
    if name is None:
        raise ValueError(f"names {text!r}, and no such checkpoint is there")
    path = tracker.parent / name
    if reason := _why_torn(path):
        raise ValueError(f"names {text!r}, but {name} {reason}")
    numbers = re.findall(r"\d+", text)
    return Resume(step=int(numbers[-1]) if numbers else None, path=path, tracker=tracker)


def _of_dlrover(text: str, names: list[str]) -> str | None:
    """The entry of a step. DLRover's adapters name it `STEP`, `checkpoint-STEP`, `step-STEP`, `global_stepSTEP` or
    `iter_00STEP`, and a script may choose another one."""
    if not text.isdecimal():
        raise ValueError(f"names no step: {text[:40]!r}")
    return next((name for name in names if _step_of(name) == int(text)), None)


def _of_megatron(text: str, names: list[str]) -> str | None:
    if not text.isdecimal() and text != "release":
        raise ValueError(f"names no iteration: {text[:40]!r}")
    name = f"iter_{int(text):07d}" if text.isdecimal() else text
    return name if name in names else None


def _of_deepspeed(text: str, names: list[str]) -> str | None:
    return text if text in names and text not in _TRACKERS and not text.startswith(".") else None


_TRACKERS: dict[str, Callable[[str, list[str]], str | None]] = {
    "dlrover_latest.txt": _of_dlrover,
    "latest_checkpointed_iteration.txt": _of_megatron,
    "latest": _of_deepspeed,
}
"""The files in the order in which they count."""


def _step_of(name: str) -> int | None:
    """The step in the name of a checkpoint; None if it is not that of a checkpoint."""
    match = re.fullmatch(r"[A-Za-z_.=-]*?(\d+)(\.(pt|pth|ckpt|bin|safetensors))?", name)
    return int(match[1]) if match else None


def _why_torn(path: Path) -> str:
    """Why a checkpoint cannot be loaded, as far as can be seen; empty if nothing is seen."""
    if not path.is_dir():
        return "" if path.stat().st_size else "is empty"
    files = [one for one in path.rglob("*") if one.is_file()]
    if not files:
        return "is empty"
    parts = [one for one in files if one.name.endswith(_DCP_DATA)]
    if parts and not any((one.parent / _DCP_INDEX).exists() for one in parts):
        return f"has no {_DCP_INDEX}"
    return ""
