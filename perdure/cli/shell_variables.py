"""Chooses the variables of the calling shell that a job's processes get, so that a command means the same there.

The worker that starts local nodes may have been started from another shell. A job's specification is kept in Temporal,
so secrets are left out, and so is what no specification can hold. Shells on clusters have variables of tens of
kilobytes, and some with bytes that are no text; neither keeps a command from running.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import typer

from perdure.base.text_variables import is_text

SHELL_VARIABLES = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")
SHELL_PREFIXES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_")
"""Variables of the calling shell that are passed on."""

MOST_BYTES = 12 * 1024
"""Bytes of the variables that are passed on unasked: three quarters of what a specification may have."""

_LISTS = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH"})
"""Lists of folders, of which the first ones count most."""


def shell_environment(
    assignments: Iterable[str],
    *,
    say: Callable[[str], object],
    shell: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Returns the variables of this shell that a local node gets: those that commands need, and those requested by
    `--env`.

    Args:
        assignments: The values of `--env`: NAME=VALUE, or NAME for a variable as it is here.
        say: Called with what is left out, for people.
        shell: The shell's variables.

    Raises:
        typer.BadParameter: if a requested variable is not set here.
    """
    requested: dict[str, str] = {}
    for assignment in assignments:
        variable, given, value = assignment.partition("=")
        if not given and variable not in shell:
            raise typer.BadParameter(f"{variable} is not set here; write {variable}=VALUE", param_hint="--env")
        requested[variable] = value if given else shell[variable]
    passed_on = {
        name: value
        for name, value in shell.items()
        if value and (name in SHELL_VARIABLES or name.startswith(SHELL_PREFIXES)) and name not in requested
    }
    if "PATH" not in requested:
        passed_on["PATH"] = _with_own_programs(passed_on.get("PATH", os.defpath))
    return _fitting(_texts(passed_on, say), say) | _texts(requested, say)


def _with_own_programs(path: str) -> str:
    """Adds the folder of this program: a user who calls perdure by its path, without activating its environment, still
    means the torchrun beside it."""
    beside = str(Path(sys.executable).parent)
    return path if beside in path.split(os.pathsep) else os.pathsep.join((path, beside))


def _texts(variables: Mapping[str, str], say: Callable[[str], object]) -> dict[str, str]:
    """Leaves out what is no text. Of a list of folders only the entries that are none."""
    kept: dict[str, str] = {}
    for name, value in variables.items():
        entries = value.split(os.pathsep) if name in _LISTS else [value]
        texts = [entry for entry in entries if is_text(entry)]
        if is_text(name) and texts:
            kept[name] = os.pathsep.join(texts)
        if not is_text(name) or len(texts) < len(entries):
            shown = os.fsencode(name).decode(errors="replace")
            what = f"a part of {shown}" if name in kept else shown
            say(f"{what} is left out: its bytes are no UTF-8, and a specification holds only texts")
    return kept


def _fitting(variables: Mapping[str, str], say: Callable[[str], object]) -> dict[str, str]:
    """Leaves out what is too long: of lists of folders the last entries, other variables as a whole."""
    most = _fair_share([_size(item) for item in variables.items()])
    kept: dict[str, str] = {}
    for name, value in variables.items():
        shorter = value if _size((name, value)) <= most else _shortened(name, value, to=most)
        if shorter:
            kept[name] = shorter
        if shorter != value:
            entries, left = value.count(os.pathsep) + 1, shorter.count(os.pathsep) + 1
            what = f"{entries - left} of the {entries} folders in {name} are" if shorter else f"{name} is"
            say(
                f"{what} left out: with {len(value):,} characters it is too long for a job's specification. Set it in "
                "a script that the command runs, where the nodes need all of it"
            )
    return kept


def _fair_share(sizes: Iterable[int]) -> int:
    """Returns the size to which the largest ones must be cut so that all fit."""
    ordered, room = sorted(sizes), MOST_BYTES
    for index, size in enumerate(ordered):
        if size > room // (len(ordered) - index):
            return room // (len(ordered) - index)
        room -= size
    return MOST_BYTES


def _shortened(name: str, value: str, *, to: int) -> str:
    """Returns the first folders of a list that fit, those of this program among them; empty for any other variable."""
    if name not in _LISTS:
        return ""
    own = str(Path(sys.executable).parent)
    entries = list(dict.fromkeys(value.split(os.pathsep)))
    must = [own] if name == "PATH" and own in entries else []
    room = to - _size((name, os.pathsep.join(must)))
    kept: list[str] = []
    for entry in entries:
        room -= _size(("", entry))
        if room < 0:
            break
        kept.append(entry)
    return os.pathsep.join((*kept, *(entry for entry in must if entry not in kept)))


def _size(item: tuple[str, str]) -> int:
    """Returns the bytes of a name and its value in a specification, at most."""
    return sum(len(text.encode()) + text.count("\\") + text.count('"') + 3 for text in item)
