"""The `perdure` command, and the same as an extension of Temporal's command line: `temporal perdure`."""

from __future__ import annotations

import os
import signal
import sys
from inspect import cleandoc
from typing import Annotated, NoReturn

import typer

from perdure.base.errors import ExitCode, PerdureError
from perdure.base.services import leave
from perdure.cli import (
    change,
    check,
    cluster,
    common,
    encryption,
    history,
    importing,
    inspect,
    join,
    logs,
    notify,
    operate,
    plan,
    report,
    scale,
    secret,
    shell,
    spec,
    stacks,
    start,
    ticket,
    top,
    ui,
    watch,
)
from perdure.cli.common import OutputFormat, as_command
from perdure.cli.terminal import ReaderGone

app = typer.Typer(
    name="perdure",
    help="Keeps distributed PyTorch training running.\n\n"
    "[dim]perdure run --nodes 2:4 -- torchrun train.py[/]   starts what is missing, runs the job, shows it live",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_START = "Start jobs"
_LOOK = "Look at jobs"
_CHANGE = "Change jobs"
_CONTROL_PLANE = "Run the control plane"

app.command("run", rich_help_panel=_START)(start.run)
app.command("submit", rich_help_panel=_START)(start.submit)
app.command("join", rich_help_panel=_START)(join.join)
app.command("ticket", rich_help_panel=_START)(ticket.ticket)
app.command("validate", rich_help_panel=_START)(spec.validate)
app.command("schema", rich_help_panel=_START)(spec.schema)
app.command("import", rich_help_panel=_START)(importing.import_)
app.command("secret", rich_help_panel=_START)(secret.secret)
app.command("notify", rich_help_panel=_START)(notify.notify)
app.command("list", rich_help_panel=_LOOK)(inspect.list_)
app.command("status", rich_help_panel=_LOOK)(inspect.status)
app.command("top", rich_help_panel=_LOOK)(top.top)
app.command("watch", rich_help_panel=_LOOK)(watch.watch)
app.command("logs", rich_help_panel=_LOOK)(logs.logs)
app.command("explain", rich_help_panel=_LOOK)(inspect.explain)
app.command("nodes", rich_help_panel=_LOOK)(inspect.nodes)
app.command("stacks", rich_help_panel=_LOOK)(stacks.stacks)
app.command("check", rich_help_panel=_LOOK)(check.check)
app.command("plan", rich_help_panel=_LOOK)(plan.plan)
app.command("cluster", rich_help_panel=_LOOK)(cluster.cluster)
app.command("history", rich_help_panel=_LOOK)(history.history)
app.command("ui", rich_help_panel=_LOOK)(ui.ui)
app.command("report", rich_help_panel=_LOOK)(report.report)
app.command("plot", rich_help_panel=_LOOK)(report.plot)
app.command("shell", rich_help_panel=_LOOK)(shell.shell)
app.command("scale", rich_help_panel=_CHANGE)(scale.scale)
app.command("suspend", rich_help_panel=_CHANGE)(change.suspend)
app.command("resume", rich_help_panel=_CHANGE)(change.resume)
app.command("restart", rich_help_panel=_CHANGE)(change.restart)
app.command("pause-repairs", rich_help_panel=_CHANGE)(change.pause_repairs)
app.command("resume-repairs", rich_help_panel=_CHANGE)(change.resume_repairs)
app.command("checkpoint", rich_help_panel=_CHANGE)(change.checkpoint)
app.command("cancel", rich_help_panel=_CHANGE)(change.cancel)
app.command("worker", rich_help_panel=_CONTROL_PLANE)(operate.worker)
app.command("operator", rich_help_panel=_CONTROL_PLANE)(operate.operator)
app.command("gateway", rich_help_panel=_CONTROL_PLANE)(operate.gateway)
app.command("page", rich_help_panel=_CONTROL_PLANE)(operate.page)
app.command("doctor", rich_help_panel=_CONTROL_PLANE)(operate.doctor)
app.command(
    "temporal",
    rich_help_panel=_CONTROL_PLANE,
    add_help_option=False,
    options_metavar="[ARGUMENTS]...",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(encryption.temporal)
app.command("codec-server", rich_help_panel=_CONTROL_PLANE)(encryption.codec_server)
app.command("payload-keys", rich_help_panel=_CONTROL_PLANE)(encryption.payload_keys)


def _join_lines(documentation: str) -> str:
    """Joins the lines of each paragraph, which the width of the terminal breaks again; examples keep theirs."""
    paragraphs = cleandoc(documentation).split("\n\n")
    return "\n\n".join(part if part.startswith("[dim]") else " ".join(part.split()) for part in paragraphs)


for command in app.registered_commands:
    assert command.callback
    command.help = _join_lines(command.callback.__doc__ or "")
    command.callback = as_command(command.callback)


def _show_version(requested: bool) -> None:
    if requested:
        import perdure

        common.out.print(f"perdure {perdure.__version__}")
        raise typer.Exit


def _of_temporal(*names: str) -> typer.models.OptionInfo:
    return typer.Option(*names, hidden=True)


@app.callback()
def before(
    output: Annotated[str | None, _of_temporal("--output", "-o")] = None,
    profile: Annotated[str | None, _of_temporal("--profile")] = None,
    config_file: Annotated[str | None, _of_temporal("--config-file")] = None,
    color: Annotated[str | None, _of_temporal("--color")] = None,
    _env: Annotated[str | None, _of_temporal("--env")] = None,
    _env_file: Annotated[str | None, _of_temporal("--env-file")] = None,
    _log_level: Annotated[str | None, _of_temporal("--log-level")] = None,
    _log_format: Annotated[str | None, _of_temporal("--log-format")] = None,
    _time_format: Annotated[str | None, _of_temporal("--time-format")] = None,
    _command_timeout: Annotated[str | None, _of_temporal("--command-timeout")] = None,
    _connect_timeout: Annotated[str | None, _of_temporal("--client-connect-timeout")] = None,
    _no_shorthand: Annotated[bool, _of_temporal("--no-json-shorthand-payloads")] = False,
    _no_config_file: Annotated[bool, _of_temporal("--disable-config-file")] = False,
    _no_config_env: Annotated[bool, _of_temporal("--disable-config-env")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Reads Temporal's own global options, which its command line puts before an extension's subcommand."""
    if output:
        if output not in ("text", "json", "jsonl", "none"):
            raise typer.BadParameter("expected text or json", param_hint="--output")
        common.before_subcommand.output = OutputFormat.JSON if output.startswith("json") else OutputFormat.TEXT
    if profile:
        os.environ["TEMPORAL_PROFILE"] = profile
    if config_file:
        os.environ["TEMPORAL_CONFIG_FILE"] = config_file
    if color in ("always", "never"):
        for console in (common.out, common.err):
            console.no_color = color == "never"


def run_command(arguments: list[str], *, program: str = "perdure") -> int:
    """Runs one command line; all errors are reported here."""
    # A worker would keep for all its jobs the mask of the program that happened to start it.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        app(arguments, prog_name=program)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else ExitCode.USAGE
    except KeyboardInterrupt:
        common.err.print("interrupted")
        return ExitCode.DETACHED
    except ReaderGone:
        return ExitCode.OK
    except Exception as error:
        return _report(error)
    return ExitCode.OK


def _report(error: Exception) -> ExitCode:
    """Reports the error with which a command ended."""
    if isinstance(error, PerdureError):
        common.report_error(error, error.remedy, error.exit_code)
        return error.exit_code
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        common.report_error(OSError(f"{name}{error.strerror or error}"), "", ExitCode.USAGE)
        return ExitCode.USAGE
    # A bug of Perdure must not look like a failed script.
    common.err.print_exception()
    return ExitCode.INFRASTRUCTURE


def main() -> NoReturn:
    """Entry point of `perdure`."""
    leave(run_command(sys.argv[1:]))


def temporal_extension() -> NoReturn:
    """Entry point of `temporal-perdure`, which Temporal's command line finds on PATH as `temporal perdure`."""
    leave(run_command(sys.argv[1:], program="temporal perdure"))


if __name__ == "__main__":
    main()
