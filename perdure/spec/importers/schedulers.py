"""Recognizes jobs of schedulers that hand out machines, such as Slurm's batch scripts and SkyPilot's tasks.

They are not converted: the scheduler still has to provide the machines. Each of them joins a job by one command, which
is made from the file. Nor are experiments of Determined, which consist of many trainings.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ..errors import SpecError, SpecProblem
from ..fields import Location
from ..load import read_text
from .launchers import LauncherError, Use, find_launcher, read_launch
from .metadata import to_name
from .reader import as_list, as_mapping
from .shell import fill_variables, simple_commands

_WHOLE: Location = ("document",)

_BATCH_SYSTEMS = {
    # The directive, the system, what starts a command on each of its machines, what makes an array of jobs of a script,
    # and the variable that tells them apart.
    "#SBATCH": ("Slurm", "srun ", re.compile(r"--array[= ]|-a ?\d"), "SLURM_ARRAY_TASK_ID"),
    "#PBS": ("PBS", "pbsdsh -- ", re.compile(r"-J ?\d"), "PBS_ARRAY_INDEX"),
    "#BSUB": ("LSF", "blaunch ", re.compile(r"-J ?\S*\["), "LSB_JOBINDEX"),
}
_NODES = re.compile(r"(?:--nodes[= ]|-N ?)(?P<count>\d+(?:-\d+)?)")
_NAME = re.compile(r"(?:--job-name[= ]|-J ?|-N )[\"']?(?P<name>[A-Za-z][\w.-]*)")

_PYTHON = re.compile(r"(?:^|/)python[\d.]*$")

_SKYPILOT_FIELDS = frozenset({"resources", "num_nodes", "setup", "file_mounts", "workdir", "envs"})


def refuse_batch_script(source: str | Path) -> None:
    """Refuses a scheduler's batch script, with the command that its machines join a job by.

    Args:
        source: A file, or its text.

    Raises:
        SpecError: if it is such a script, or no text.
        OSError: if the file cannot be read.
    """
    text, _ = read_text(source)
    directives = [line for line in text.splitlines() if line.startswith("#")]
    for directive, (system, starter, array, index) in _BATCH_SYSTEMS.items():
        options = "\n".join(line for line in directives if line.split(maxsplit=1)[0] == directive)
        if not options:
            continue
        found, name = _NODES.search(options), _NAME.search(options)
        nodes = found["count"].replace("-", ":") if found else ""
        raise _joins(
            f"a batch script of {system}",
            starter,
            name=name["name"] if name else "",
            # Otherwise the first one would train, and all others end with its result.
            suffix=f"-${index}" if array.search(options) else "",
            nodes=nodes,
            text=text,
        )


def refuse_skypilot_task(data: object) -> None:
    """Refuses a task of SkyPilot, with the command that its machines join a job by.

    Raises:
        SpecError: if it is such a task.
    """
    task = as_mapping(data) or {}
    run = task.get("run")
    if isinstance(run, str) and task.keys() & _SKYPILOT_FIELDS:
        nodes = str(task.get("num_nodes") or 1)
        raise _joins("a task of SkyPilot", "", name=str(task.get("name") or ""), nodes=nodes, text=run)


def refuse_determined_experiment(data: object) -> None:
    """Refuses an experiment of Determined, with the command to import in its place. It has an `entrypoint`, as a job of
    Ray has.

    Raises:
        SpecError: if it is such an experiment.
    """
    experiment = as_mapping(data) or {}
    entrypoint, searcher = experiment.get("entrypoint"), as_mapping(experiment.get("searcher"))
    if entrypoint is None or searcher is None:
        return
    words = [str(word) for word in as_list(entrypoint) or shlex.split(str(entrypoint), posix=True)]
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    slots = (as_mapping(experiment.get("resources")) or {}).get("slots_per_trial", 1)
    processes = f"--nproc-per-node={slots} " if isinstance(slots, int) and slots > 1 else ""
    trains = "COMMAND" if script is None else f"torchrun {processes}{shlex.join(words[script:])}"
    raise SpecError(
        [
            SpecProblem(
                location=_WHOLE,
                message="is an experiment of Determined, whose searcher and trials are no job of Perdure's",
                hint=f"import the command that one trial runs: perdure import -- {trains}",
            )
        ]
    )


def _joins(what: str, starter: str, *, name: str, nodes: str, text: str, suffix: str = "") -> SpecError:
    place = " ".join(("--nodes", nodes)) if nodes else "--nodes MIN:MAX"
    command = f"{starter}perdure join {to_name(name) or 'NAME'}{suffix} --wait {place} -- {_command(text)}"
    return SpecError(
        [
            SpecProblem(
                location=_WHOLE,
                message=f"is {what}, whose machines join a job and need no import",
                hint=f"in place of its line that trains, write: {command} (docs/joining.md)",
            )
        ]
    )


def _command(text: str) -> str:
    """The training command of a shell's text, without the options that Perdure's rendezvous replaces."""
    for line in simple_commands(text):
        if (found := find_launcher(line)) is None:
            continue
        start = max((at for at, word in enumerate(line[: found[0]]) if _PYTHON.search(word.text)), default=found[0])
        words = [word.raw if word.expands else word.text for word in line[start:]]
        try:
            launch = read_launch(words)
        except LauncherError:
            break
        if launch is None:
            break
        processes = launch.last(Use.PROCESSES)
        kept = [processes] if processes and fill_variables(processes.value, {}) is not None else []
        return " ".join(word if "$" in word else shlex.quote(word) for word in launch.command(keep=kept))
    return "COMMAND"
