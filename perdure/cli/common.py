"""Shared parts of all commands: options, the client, and printing of results and hints.

Heavy imports wait until a command runs, so that `perdure --help` and completion answer at once.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args, get_type_hints

import typer
from rich.text import Text

from perdure.cli.completion import complete_job
from perdure.cli.terminal import SafeConsole, as_json, link

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.client.connection import Endpoint

ResultT = TypeVar("ResultT")


class OutputFormat(StrEnum):
    """The format in which results are printed."""

    TEXT = "text"
    JSON = "json"


JobArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The job's name.", show_default=False, autocompletion=complete_job)
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", envvar="PERDURE_NAMESPACE", help="The job's namespace.")
]
RoleOption = Annotated[
    str | None,
    typer.Option(
        "--role", help="The role whose nodes are meant, for a job with several.", show_default="the job's only role"
    ),
]
OnlyRoleOption = Annotated[
    str | None,
    typer.Option("--role", help="Only this role, of a job with several.", show_default="all roles"),
]
OutputOption = Annotated[
    OutputFormat | None, typer.Option("--output", "-o", help="text, or json for scripts.", show_default="text")
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Temporal server, host:port. Default: Temporal's environment configuration, else the local server.",
        show_default=False,
    ),
]

READ_TIMEOUT = timedelta(seconds=60)
"""The longest time for which a command that only shows something waits for its answers, each of which has a limit of
its own."""

_NO_LIMIT = 4096
"""The width of a pipe in columns: its reader gets every line whole."""


# A terminal would break lines within words, and a live view cut them; a pipe gets each line whole.
out = SafeConsole(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else _NO_LIMIT)
err = SafeConsole(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def continue_without_reader() -> None:
    """Has the command go on, and end with its job's exit code, although nobody reads its output any more."""
    out.continues = err.continues = True


@dataclass
class Globals:
    """Options before the subcommand."""

    output: OutputFormat = OutputFormat.TEXT


before_subcommand = Globals()


@dataclass(frozen=True, kw_only=True)
class Session:
    """The options that many commands have, and the console. A command takes it as its last parameter, `here`.

    `as_command` gives the command these options in place of that parameter. Metadata of its annotation names them where
    the command has other ones than all in their order.
    """

    namespace: NamespaceOption = "default"
    output: OutputOption = None
    address: AddressOption = None

    @property
    def json(self) -> bool:
        """Tells whether to print JSON; an option after the subcommand wins."""
        return (self.output or before_subcommand.output) is OutputFormat.JSON

    @property
    def flag(self) -> str:
        """The option with which a suggested command finds the same namespace."""
        return "" if self.namespace == "default" else f" -n {self.namespace}"

    def run(self, work: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
        """Runs work with a connected client."""

        async def connect_and_work() -> ResultT:
            from perdure.client.client import Client

            async with Client(address=self.address, namespace=self.namespace) as client:
                return await work(client)

        return asyncio.run(connect_and_work())

    def read(self, work: Callable[[Client], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Runs work that only reads what there is: tells on stderr what it waits for, and ends after a while.

        Raises:
            ControlPlaneUnreachable: if it takes longer.
        """
        return self.run(lambda client: read_in_time(client, work))

    def show(self, value: Any) -> None:
        """Prints a value as JSON."""
        out.out(as_json(_plain(value), indent=2), highlight=False)

    def hint(self, *commands: str) -> None:
        """Ends the output with the commands that are useful next."""
        if not self.json:
            out.print(f"[dim]next:[/] {'   '.join(commands)}", markup=True)


async def read_in_time(client: Client, work: Callable[[Client], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Awaits work that only reads: see `Session.read`."""
    from perdure.client.connection import unreachable
    from perdure.client.watching import lateness

    reading = asyncio.create_task(work(client))
    try:
        async for late in lateness(reading):
            waited = f"{late.total_seconds():.0f} s"
            if late >= READ_TIMEOUT:
                raise unreachable(client.endpoint, f"no answer within {waited}")
            say(f"waiting for {client.endpoint.address or 'the archive'} and its worker: no answer for {waited}")
        return await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


ArchiveOption = Annotated[
    str | None,
    typer.Option(
        "--archive",
        metavar="URL",
        help="Read the job from this place, its specification's outputs.archive, and not from Temporal.",
        show_default=False,
    ),
]

ARCHIVE_VARIABLE = "PERDURE_ARCHIVE"
"""The place in which jobs are looked for that Temporal does not know, or not any more."""

PageArchiveOption = Annotated[
    str | None,
    typer.Option(
        "--archive",
        metavar="URL",
        envvar=ARCHIVE_VARIABLE,
        help="Show jobs from this place, their specification's outputs.archive, that Temporal does not know any more.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReadingSession(Session):
    """The session of commands that also show jobs of archives."""

    archive: ArchiveOption = None

    @property
    def flag(self) -> str:
        """The options with which a suggested command finds the same job."""
        return super().flag + ("" if self.archive is None else f" --archive {shlex.quote(self.archive)}")

    def run(self, work: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
        """Runs work with a client, or with what reads an archive where that is requested, or Temporal does not know the
        job."""
        from perdure.base.errors import JobNotFound

        if self.archive is not None:
            return self._read(self.archive, work)
        try:
            return super().run(work)
        except JobNotFound:
            place = os.environ.get(ARCHIVE_VARIABLE)
            if not place:
                raise
            say(f"not in Temporal; read from the archive at {place}")
            return self._read(place, work)

    def _read(self, url: str, work: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
        async def read() -> ResultT:
            from perdure.client.archive import ArchivedJobs

            async with ArchivedJobs(url, namespace=self.namespace) as jobs:
                return await work(jobs)

        return asyncio.run(read())


ServerSession = Annotated[Session, "output", "address"]
"""The session of commands whose jobs' namespace has no option, or one of another meaning."""


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function as typer takes it: with the options of its session in place of `here`."""
    own = signature(function, eval_str=True)
    here = own.parameters.get("here")
    if here is None:
        return function
    kind, *names = get_args(here.annotation) or (here.annotation,)
    hints = get_type_hints(kind, include_extras=True)
    options = {
        field.name: Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(kind)
    }
    shared = [options[name] for name in names or options]

    @wraps(function)
    def command(**values: Any) -> None:
        given = kind(**{option.name: values.pop(option.name) for option in shared})
        function(**values, here=given)

    parameters = [parameter for parameter in own.parameters.values() if parameter is not here]
    vars(command)["__signature__"] = own.replace(parameters=[*parameters, *shared])
    command.__annotations__ = {}
    return command


def run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    return asyncio.run(work)


def local_endpoint_only(address: str | None) -> Endpoint | None:
    """The configured endpoint; None for the local default."""
    from perdure.client.connection import configured_endpoint

    return configured_endpoint(address)


def say(text: str) -> None:
    """Prints progress of the command to stderr, apart from its result."""
    err.print(text, markup=False, style="dim")


def show_link(label: str, url: str) -> None:
    """Prints an address that can be opened."""
    out.print(Text(label, style="bold"), link(url, out, out.width - len(label)), sep="", soft_wrap=True)


def warn(text: str) -> None:
    """Prints a warning to stderr."""
    err.print("[yellow]warning:[/] ", end="")
    err.print(text, markup=False)


def report_error(error: Exception, remedy: str, exit_code: int) -> None:
    """Prints an error for people, and as JSON for scripts that requested it."""
    if before_subcommand.output is OutputFormat.JSON or "json" in _requested_outputs(sys.argv):
        message = {"error": {"message": str(error), "remedy": remedy, "exit_code": exit_code}}
        out.out(as_json(message, indent=2), highlight=False)
    err.print("[bold red]error:[/] ", end="")
    err.print(str(error), markup=False)
    if remedy:
        err.print(f"  {remedy}", markup=False)


def _requested_outputs(arguments: Sequence[str]) -> set[str]:
    """The values of -o, in all its spellings, before a `--`."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    requested: set[str] = set()
    for word, following in zip(ours, [*ours[1:], ""], strict=True):
        if word in ("-o", "--output"):
            requested.add(following)
        elif word.startswith(("-o", "--output=")):
            requested.add(word.removeprefix("--output=").removeprefix("-o"))
    return requested


def _plain(value: Any) -> Any:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[Any] | tuple[Any, ...]", value)]
    return value
