"""Runs programs with torch in processes that are forked from one which has imported it: an import takes seconds."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.support.waiting import DEADLINE
from tests.support.warm_process import warm_interpreter

_IMPORTED = ("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.nn.parallel", "torch._dynamo")


def run_with_torch(
    *programs: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, within: float = DEADLINE
) -> list[subprocess.CompletedProcess[str]]:
    """Runs one process for each environment, side by side.

    Args:
        programs: what follows `python` on the command line; one may stand for all.
        environments: all variables of each process.
        folder: in which they work.
        within: seconds; those that still run are killed.

    Returns:
        How each of them has ended, and what it has printed.

    Raises:
        subprocess.TimeoutExpired: if one has not ended in time.
    """
    interpreter = warm_interpreter(*_IMPORTED)
    if len(programs) == 1:
        programs *= len(environments)
    with ExitStack() as files:
        written = [
            [files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2)]
            for _ in environments
        ]
        processes = [
            interpreter.start(
                "tests.training.torch_program",
                *program,
                environment=environment,
                folder=folder,
                output=output.fileno(),
                errors=errors.fileno(),
            )
            for program, environment, (output, errors) in zip(programs, environments, written, strict=True)
        ]
        late = [process for process in processes if not process.ends_within(within)]
        for process in late:
            process.kill()
            process.ends_within(within)
        for file in (file for pair in written for file in pair):
            file.seek(0)
        ended = [
            subprocess.CompletedProcess(list(program), process.returncode or 0, output.read(), errors.read())
            for program, process, (output, errors) in zip(programs, processes, written, strict=True)
        ]
        if late:
            told = "\n".join(f"{one.stdout}{one.stderr}" for one in ended)
            raise subprocess.TimeoutExpired(list(programs[0]), within, told)
        return ended
