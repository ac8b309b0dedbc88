"""A warm interpreter for one command, and the same command started without it, for comparison."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure_launcher.system.processes import begin_child
from perdure_launcher.warm_start.names import LEARNED, STANDBYS
from perdure_launcher.warm_start.plan import Plan
from perdure_launcher.warm_start.starts import Start, read_starts
from perdure_launcher.warm_start.supervisor import InterpreterSupervisor, offer
from tests.launcher.nodes import ROOT, SCRIPTS
from tests.support.waiting import wait_for

STUB_TORCH = Path(__file__).parent / "stub_torch"
GENERATION = 7
PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PERDURE_GENERATION": str(GENERATION)}


@dataclass
class Warmth:
    """A warm interpreter for one command, and the same command without it."""

    arguments: list[str]
    environment: dict[str, str]
    executable: str = sys.executable
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pw-")) / "warm")

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.offered: dict[str, str] = {}
        assert offer(self.folder, self.offered, python=self.executable) == ""
        plan = Plan.of_ranks(self.arguments, self.environment)
        self.supervisor = InterpreterSupervisor(folder=self.folder, python=self.executable, plan=plan)

    def start(
        self,
        *arguments: str,
        warm: bool = True,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[str]:
        """Starts the command as torchrun would, with these arguments in place of its own where there are any."""
        python = self.offered["PYTHON_EXEC"] if warm else self.executable
        return subprocess.Popen(
            [*wrapper, python, *self.arguments[:2], *(arguments or self.arguments[2:])],
            cwd=SCRIPTS,
            env={**self.environment, **PLACE, **(self.offered if warm else {}), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=begin_child,  # noqa: PLW1509 - system calls only
        )

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **options)  # pyrefly: ignore[bad-argument-type]
        stdout, stderr = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def learn(self) -> dict[str, Any]:
        """Waits until the interpreter has tried to import what a rank told it."""
        return self._said(LEARNED, lambda _: True)

    def standby(self, *, local_rank: int = 0) -> int:
        """Waits for the standby of a rank; returns its process."""
        return self._said(STANDBYS, lambda said: str(local_rank) in said["ready"])["ready"][str(local_rank)]

    def _said(self, name: str, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:

        def said() -> dict[str, Any] | None:
            with contextlib.suppress(FileNotFoundError):
                content = json.loads((self.folder / name).read_text())
                return content if enough(content) else None
            return None

        return wait_for(said, within=60, what=self.log)

    @property
    def last(self) -> Start:
        [start] = read_starts(self.folder, generation=GENERATION, processes=1)
        return start

    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextlib.contextmanager
def warmth(
    *arguments: str, executable: str = sys.executable, real_torch: bool = False, **environment: str
) -> Iterator[Warmth]:
    """A warm interpreter that is kept within.

    Args:
        arguments: The script, and its own.
        executable: The interpreter of both.
        real_torch: Where torch itself makes a difference; else `stub_torch` stands for it.
        environment: Variables beside the inherited ones.
    """
    # Where the supervisor is, is where ranks are: the interpreter inherits it from the process that keeps it.
    before = os.getcwd()
    os.chdir(SCRIPTS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PYTEST_"))}
    path = [*([] if real_torch else [STUB_TORCH]), environment.get("PYTHONPATH", ROOT)]
    found = Warmth(
        arguments=["-u", *arguments],
        environment={**inherited, "TZ": "UTC", **environment, "PYTHONPATH": os.pathsep.join(map(str, path))},
        executable=executable,
    )
    try:
        found.supervisor.ensure()
        yield found
    finally:
        found.supervisor.close()
        os.chdir(before)
        shutil.rmtree(found.folder.parent, ignore_errors=True)


def interpreter_with(packages: Mapping[str, str], folder: Path) -> str:
    """An interpreter of an environment that has these packages installed, and all that this one has.

    Args:
        packages: Their sources, by name.
        folder: Where the environment is made.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    program = folder / "bin" / "python"
    paths = subprocess.check_output(
        [str(program), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    installed = Path(paths.strip())
    for name, source in packages.items():
        (installed / f"{name}.py").write_text(source)
    (installed / "all_others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return str(program)
