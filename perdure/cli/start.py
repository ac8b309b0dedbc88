"""Commands that start jobs: run and submit."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import shutil
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.base.errors import ExitCode
from perdure.cli.common import (
    NamespaceOption,
    ServerSession,
    Session,
    local_endpoint_only,
    out,
    run_async,
    say,
    show_link,
    warn,
)
from perdure.cli.reporting import Draft, ReportOption, reporting
from perdure.cli.shell_variables import shell_environment

_OF_SHELLS = frozenset({"cd", "source", ".", "export", "module", "conda", "ulimit", "eval", "set", "ml"})
"""Words that shells carry out themselves, or that their start files define."""

if TYPE_CHECKING:
    from perdure.client.connection import Endpoint
    from perdure.client.views import Submission
    from perdure.spec.backends import SpecWarning
    from perdure.spec.job import JobSpec

NameOption = Annotated[
    str | None,
    typer.Option("--name", help="The job's name.", show_default="the file's, or the script's with a suffix"),
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", help="The source of nodes.", show_default="the file's, else local"),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the job, and exit with its exit code.")]
SpecDryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the specification; start nothing.")]


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND… | FILE", help="The training command, or a job file.", show_default=False),
    ],
    nodes: Annotated[
        str | None, typer.Option("--nodes", help="Number of nodes: 4, or 2:4 for min and max.", show_default="1")
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node", help="Processes per node: a number, gpu, or auto.", show_default="one per GPU, else 1"
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="Set for the processes; without a value: as here."),
    ] = None,
    name: NameOption = None,
    namespace: NamespaceOption = "default",
    backend: BackendOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start the job and leave at once.")] = False,
    dry_run: SpecDryRunOption = False,
    *,
    here: ServerSession,
) -> None:
    """Run a training command as a fault-tolerant job, and watch it.

    Starts what is missing here: a Temporal server with its database in the state folder, and a worker.

    Ctrl-C detaches: the job continues. The job gets this shell's PATH, PYTHONPATH and the variables of torch, CUDA,
    NCCL and the like; pass others with --env.

    [dim]perdure run --nodes 2:4 -- torchrun train.py --lr 3e-4[/]
    [dim]perdure run --nodes 2 --nproc-per-node 4 --name llama -- torchrun train.py[/]
    [dim]perdure run job.yaml[/]

    Exit codes: 0 ok · 1 the script failed · 2 usage or specification · 3 infrastructure ·
    4 cancelled · 5 deadline · 6 control plane unreachable · 130 detached.
    """
    if _is_file(command):
        if nodes or nproc_per_node or env:
            raise typer.BadParameter(
                "the file sets this; change it there", param_hint="--nodes, --nproc-per-node, --env"
            )
        spec, warnings = _from_file(command[0], name=name, namespace=namespace, backend=backend)
    else:
        spec, warnings = _from_command(
            command,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            env=env or [],
            name=name,
            namespace=namespace,
            backend=backend,
        )
    if dry_run:
        _check_command(spec)
        _show_spec(here, spec)
        return
    raise typer.Exit(run_spec(here, spec, tuple(map(str, warnings)), detach=detach))


def run_spec(here: Session, spec: JobSpec, warnings: tuple[str, ...], *, detach: bool = False) -> int:
    """Runs a specification as `perdure run` does, and returns the exit code."""
    _check_command(spec)
    for warning in warnings:
        warn(warning)
    return run_async(_run(here, spec, detach=detach))


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job, in YAML or JSON.", show_default=False)],
    name: NameOption = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", envvar="PERDURE_NAMESPACE", help="Overrides the file's.")
    ] = None,
    backend: BackendOption = None,
    wait: WaitOption = False,
    report: ReportOption = None,
    dry_run: SpecDryRunOption = False,
    *,
    here: ServerSession,
) -> None:
    """Submit a job to a running control plane.

    [dim]perdure submit job.yaml · perdure submit job.yaml --wait -o json[/]
    [dim]perdure submit job.yaml --wait --report github --report junit=perdure.xml[/]
    """
    with reporting(report, file) as draft:
        spec, warnings = _from_file(str(file), name=name, namespace=namespace, backend=backend)
        _check_script(spec)
        draft.add_problems(file, (), warnings)
        if dry_run:
            _show_spec(here, spec)
            return
        for warning in warnings:
            warn(str(warning))
        code = run_async(_submit(here, spec, draft, wait=wait))
    raise typer.Exit(code)


async def _run(here: Session, spec: JobSpec, *, detach: bool) -> int:
    """Starts the control plane if necessary, then submits and follows the job."""
    from perdure.local.control_plane import LocalControlPlane
    from perdure.spec.capabilities import CAPABILITIES

    if local_endpoint_only(here.address) is None:
        await LocalControlPlane(report=say).ensure()
    elif CAPABILITIES[spec.backend].runs_beside_worker:
        say("A Temporal server is configured: its nodes run where its workers do.")
    return await _submit(here, spec, Draft((), ()), wait=not detach)


async def _submit(here: Session, spec: JobSpec, draft: Draft, *, wait: bool) -> int:
    from perdure.cli.live import follow
    from perdure.client.client import Client

    here = replace(here, namespace=spec.namespace)
    async with Client(address=here.address, namespace=here.namespace) as client:
        submission = await client.submit(spec, report=None if here.json else say)
        if wait:
            if not here.json:
                out.print(f"Submitted [bold]{submission.name}[/] to {_where(client.endpoint)}")
            with draft.muted(), passing_on(client.namespace, submission.name):
                code = await follow(client, here, submission.name, keys=True, output=True)
            if code is not ExitCode.DETACHED:
                await draft.take_end(client, submission.name)
            return code
        _tell(here, submission, client.endpoint)
        return 0


@contextmanager
def passing_on(namespace: str, name: str) -> Generator[None]:
    """Has signals that scripts handle reach the job's ranks on this machine, and not end this command."""
    from perdure.client.local_nodes import pass_on
    from perdure_launcher.system.user_signals import USER_SIGNALS

    loop = asyncio.get_running_loop()
    # Ctrl-Z is the terminal's.
    numbers = [one for one in USER_SIGNALS if one is not signal.SIGTSTP and signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        loop.add_signal_handler(number, partial(pass_on, number, namespace=namespace, name=name))
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _tell(here: Session, submission: Submission, endpoint: Endpoint) -> None:
    if here.json:
        here.show(submission)
        return
    out.print(f"Submitted [bold]{submission.name}[/] to {_where(endpoint)}")
    if submission.page:
        show_link("  ", submission.page)
    here.hint(f"perdure watch {submission.name}{here.flag}", f"perdure cancel {submission.name}{here.flag}")


def _where(endpoint: Endpoint) -> str:
    return f"{'the local server' if endpoint.is_local_default else 'Temporal'} at {endpoint.address}"


def _is_file(command: list[str]) -> bool:
    return len(command) == 1 and command[0].endswith((".yaml", ".yml", ".json"))


def _from_file(
    file: str, *, name: str | None, namespace: str | None, backend: str | None
) -> tuple[JobSpec, tuple[SpecWarning, ...]]:
    from perdure.spec.load import validate_file

    overrides: dict[str, Any] = {}
    if name:
        overrides["name"] = name
    if namespace and namespace != "default":
        overrides["namespace"] = namespace
    if backend:
        overrides["backend"] = backend
    return validate_file(Path(file), overrides=overrides)


def _from_command(
    command: list[str],
    *,
    nodes: str | None,
    nproc_per_node: str | None,
    env: list[str],
    name: str | None,
    namespace: str,
    backend: str | None,
) -> tuple[JobSpec, tuple[SpecWarning, ...]]:
    from perdure.spec.validate import default_name, one_line_spec, validate_spec

    spec = one_line_spec(
        command=command,
        name=name or f"{default_name(command)}-{secrets.token_hex(2)}",
        nodes=nodes or 1,
        nproc_per_node=nproc_per_node,
        namespace=namespace,
        workdir=os.getcwd(),
        env=shell_environment(env, say=warn),
        backend=backend or "local",
    )
    return validate_spec(spec)


def _check_command(spec: JobSpec) -> None:
    """Refuses a program, and its script, that does not exist on this machine, where the nodes will run."""
    from perdure.base.errors import PerdureError
    from perdure.spec.capabilities import CAPABILITIES

    if not CAPABILITIES[spec.backend].runs_beside_worker or local_endpoint_only(None):
        return
    folder = _folder_of(spec)
    for role_name, role in spec.roles.items():
        program = role.command[0]
        if "/" in program:
            path = Path(folder, program)
            if path.is_file() and not os.access(path, os.X_OK):
                raise PerdureError(
                    f'roles.{role_name}.command: "{program}" in {folder} is not executable',
                    remedy=f"Run chmod +x {shlex.quote(str(path))}, or put its interpreter in front: "
                    f"{_interpreter_of(path)} {shlex.quote(program)}.",
                )
            found = path.is_file()
            places = f"in {folder}"
        else:
            found = shutil.which(program, path=spec.env_of(role_name).get("PATH")) is not None
            places = "on PATH"
        if not found:
            raise PerdureError(
                f'roles.{role_name}.command: there is no program "{program}" {places}',
                remedy=_remedy_of_a_missing(program, role.command),
            )
    _check_script(spec)


def _remedy_of_a_missing(program: str, command: Sequence[str]) -> str:
    """Advises on a first word of a command that is no program, by what only a shell makes of it."""
    if re.match(r"[A-Za-z_]\w*=", program):
        return f"A shell would set it as a variable: perdure run --env {shlex.quote(program)} -- …"
    if " " in program and len(command) == 1:
        return f"Leave out the quotes around it, or have a shell read it: -- bash -c {shlex.quote(program)}"
    if program in _OF_SHELLS:
        return f"Only a shell knows it: -- bash -c {shlex.quote(f'{shlex.join(command)} && …')}"
    return (
        "Give its path, or activate the environment that has it. A script needs its interpreter in front: torchrun "
        "train.py, python train.py."
    )


def _interpreter_of(script: Path) -> str:
    """Returns the program that most probably runs a script, by its name."""
    return "python" if script.suffix == ".py" else "bash"


def _check_script(spec: JobSpec) -> None:
    """Refuses a script that does not exist on this machine, where the nodes will run."""
    from perdure.base.errors import PerdureError
    from perdure.spec.capabilities import CAPABILITIES
    from perdure.spec.importers.launchers import script_of

    if not CAPABILITIES[spec.backend].runs_beside_worker or local_endpoint_only(None):
        return
    folder = _folder_of(spec)
    for role_name, role in spec.roles.items():
        script = script_of(role.command)
        if script is not None and not Path(folder, script).exists():
            raise PerdureError(
                f'roles.{role_name}.command: there is no script "{script}" in {folder}',
                remedy="Give its path from there, or set workdir.path to the folder that has it.",
            )


def _folder_of(spec: JobSpec) -> str:
    return spec.workdir.path if spec.workdir and spec.workdir.path else os.getcwd()


def _show_spec(here: Session, spec: JobSpec) -> None:
    from perdure.cli import auto
    from perdure.client.workdir import pack_workdir_of
    from perdure.spec.dump import dump_yaml
    from perdure.spec.validate import to_mapping

    if packed := pack_workdir_of(spec):
        say(f"The working directory would be uploaded: {packed}")
    for line in auto.words(auto.choose(here, [spec])[0]):
        say(f"It would request now, for {line}")
    if here.json:
        here.show(to_mapping(spec))
    else:
        out.out(dump_yaml(to_mapping(spec)), end="", highlight=False)
