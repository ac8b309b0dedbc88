"""Commands that run the control plane: worker, gateway, operator and doctor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.base.log_format import FORMAT_VARIABLE, LogFormat
from perdure.cli.common import (
    AddressOption,
    PageArchiveOption,
    ServerSession,
    Session,
    local_endpoint_only,
    out,
    run_async,
    say,
)
from perdure.cli.ui import check_url, is_own_name
from perdure.operator.ownership import Ownership

if TYPE_CHECKING:
    from pydantic import JsonValue

    from perdure.contract import ArchivedJob
    from perdure.gateway.certificates import SiteCertificate
    from perdure.spec.job import Backend

HealthPortOption = Annotated[
    int | None,
    typer.Option(
        "--health-port",
        min=1,
        max=65535,
        help="Answer GET /healthz on this port while the service runs.",
        show_default="none",
    ),
]

TlsKeyOption = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", help="The private key of --tls-certificate.", show_default=False),
]

OperatorHealthPortOption = Annotated[
    int | None,
    typer.Option(
        "--health-port",
        min=1,
        max=65535,
        help="Answer GET /healthz on this port while the operator runs, and GET /readyz with the namespaces that it "
        "serves and those that it cannot serve now.",
        show_default="none",
    ),
]

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar=FORMAT_VARIABLE,
        show_envvar=False,
        help=f"How log lines are written; {FORMAT_VARIABLE} sets it, too, and agents use the format of their worker.",
    ),
]

MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", min=1, max=65535, help="Serve Prometheus metrics on this port.", show_default="none"
    ),
]


def worker(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start the local server and a worker in the background, and return.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the local worker and server; nodes continue.")] = False,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="BACKEND",
            help="The source of nodes: local, kubernetes or ray. May be repeated.",
            show_default="local",
        ),
    ] = None,
    metrics_port: MetricsPortOption = None,
    health_port: HealthPortOption = None,
    log_file: Annotated[
        Path | None, typer.Option("--log-file", help="Log to this file, with rotation.", show_default="standard error")
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    events: Annotated[
        Path | None,
        typer.Option(
            "--events",
            help="Append the events of jobs to this file, as lines of JSON; - for standard output.",
            show_default="none",
        ),
    ] = None,
    address: AddressOption = None,
) -> None:
    """Run a worker, which makes jobs' decisions and starts their nodes; several may run at once.

    Jobs and nodes outlive it: stop and start it at any time.

    [dim]perdure worker --metrics-port 9464 · perdure worker --detach · perdure worker --stop[/]
    """
    if detach or stop:
        if local_endpoint_only(address):
            raise typer.BadParameter(
                "a Temporal server is configured; these are for the local default", param_hint="--detach, --stop"
            )
        run_async(_stop() if stop else _detach())
        return
    backends = _backends(backend or ["local"], create_nodes=True)
    from perdure import worker
    from perdure.base.services import run_service

    service = worker.serve(
        address=address,
        metrics_port=metrics_port,
        health_port=health_port,
        backends=backends,
        events=events,
        render=_render,
    )
    raise typer.Exit(run_service(service, logger=worker.logger, log_file=log_file, log_format=log_format))


def _render(record: ArchivedJob) -> str:
    """The report of a job, for its archive; the page's packages are imported by the first one."""
    from perdure.page.report import report_of

    return report_of(record)


def _backends(names: Sequence[str], *, create_nodes: bool = False) -> list[Backend]:
    from perdure.spec.capabilities import CAPABILITIES

    served = {str(backend): backend for backend, can in CAPABILITIES.items() if can.creates_nodes or not create_nodes}
    if unknown := [name for name in names if name not in served]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(served)}", param_hint="--backend")
    return [served[name] for name in names]


def _site_certificate(certificate: Path | None, key: Path | None) -> SiteCertificate | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise typer.BadParameter("name both files", param_hint="--tls-certificate, --tls-key")
    from perdure.gateway.certificates import SiteCertificate

    return SiteCertificate(certificate=certificate, private_key=key)


def gateway(
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Serve agents at this address; without HOST, at all of this machine's.",
        ),
    ] = ":7433",
    keyring_secret: Annotated[
        str | None,
        typer.Option(
            "--keyring-secret",
            metavar="NAME",
            help="The Secret with the keys, in the gateway's own namespace; it is created if it does not exist.",
            show_default="perdure-gateway",
        ),
    ] = None,
    metrics_port: MetricsPortOption = None,
    keyring: Annotated[
        Path | None,
        typer.Option(
            "--keyring",
            metavar="FOLDER",
            help="A folder with the keys, without a cluster: serve machines that join, and no pods. It is created if "
            "it does not exist.",
            show_default=False,
        ),
    ] = None,
    only_keyring: Annotated[
        bool,
        typer.Option("--only-keyring", help="Create the Secret with the keys if it does not exist, and exit."),
    ] = False,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            metavar="FILE",
            help="The site's certificate, besides the gateway's own, for machines that call it by a public name. It is "
            "read again when it changes.",
            show_default=False,
        ),
    ] = None,
    tls_key: TlsKeyOption = None,
    health_port: HealthPortOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    address: AddressOption = None,
) -> None:
    """Run a gateway, through which agents in pods and on machines reach the control plane, and no more of Temporal.

    It keeps no state, and several may run at once: training continues while one is replaced, or while none runs.

    [dim]perdure gateway --health-port 8080 --metrics-port 9464 · perdure gateway --listen 10.0.0.5:7433[/]
    """
    if keyring and keyring_secret:
        raise typer.BadParameter("the keys are in the folder", param_hint="--keyring-secret")
    if keyring and only_keyring:
        raise typer.BadParameter("the first gateway makes the folder", param_hint="--only-keyring")
    certificate = _site_certificate(tls_certificate, tls_key)
    from perdure.base.services import run_service
    from perdure.gateway import serve

    secret = keyring_secret or serve.KEYRING_SECRET
    if only_keyring:
        raise typer.Exit(run_service(serve.make_keyring(secret), logger=serve.logger, log_format=log_format))
    service = serve.serve(
        address=address,
        listen=listen,
        certificate=certificate,
        keyring=keyring,
        keyring_secret=secret,
        health_port=health_port,
        metrics_port=metrics_port,
    )
    raise typer.Exit(run_service(service, logger=serve.logger, log_format=log_format))


def page(
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Serve browsers at this address; without HOST, at all of this machine's.",
        ),
    ] = ":8234",
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAMESPACE",
            help="Show jobs of this namespace only. May be repeated.",
            show_default="all",
        ),
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            "--url",
            metavar="URL",
            help="The address at which browsers know it, with its path; without it, only this machine's own names are "
            "answered, as through kubectl port-forward.",
        ),
    ] = "",
    audience: Annotated[
        str,
        typer.Option(
            "--audience",
            help="The audience for which tokens must be made; empty: the API server's own, as those of the site's "
            "identity provider are.",
        ),
    ] = "perdure-page",
    read_only: Annotated[bool, typer.Option("--read-only", help="Show no buttons, and change nothing.")] = False,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            metavar="FILE",
            help="Serve TLS with this certificate, which is read again when it changes.",
            show_default="something before it adds TLS",
        ),
    ] = None,
    tls_key: TlsKeyOption = None,
    archive: PageArchiveOption = None,
    health_port: HealthPortOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    address: AddressOption = None,
) -> None:
    """Run the page of a site: jobs in a browser, for users whom the cluster knows, who do what their rights allow.

    Users sign in with a token that the API server accepts, or a proxy before the page sends theirs. They see the jobs
    of namespaces whose trainingjobs they may list, and change those that they may update.

    [dim]perdure page --url https://perdure.example · perdure page --namespace nlp --read-only[/]
    """
    certificate = _site_certificate(tls_certificate, tls_key)
    check_url(url)
    if url.startswith("http:") and not is_own_name(url):
        raise typer.BadParameter(
            f'got "{url}"; tokens must not cross a network unencrypted: name an address with https', param_hint="--url"
        )
    from perdure.base.services import run_service
    from perdure.page import site
    from perdure.page.server import logger

    service = site.serve(
        address=address,
        listen=listen,
        namespaces=namespaces or (),
        url=url,
        audience=audience,
        read_only=read_only,
        archive=archive,
        certificate=certificate,
        health_port=health_port,
    )
    raise typer.Exit(run_service(service, logger=logger, log_format=log_format))


def operator(
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAMESPACE",
            help="Serve only this Kubernetes namespace. May be repeated.",
            show_default="all",
        ),
    ] = None,
    owners: Annotated[
        Ownership,
        typer.Option(
            help="How to treat the owner that the cluster's admission policies record in each object: require one, and "
            "check that the owner may use what the job names; accept objects without one unchecked; or ignore owners.",
        ),
    ] = Ownership.REQUIRE,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="BACKEND",
            help="A backend that objects may name: kubernetes, joined, ray or local. May be repeated.",
            show_default="kubernetes and joined",
        ),
    ] = None,
    metrics_port: MetricsPortOption = None,
    health_port: OperatorHealthPortOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    address: AddressOption = None,
) -> None:
    """Run the operator, which starts a job for each TrainingJob object of a cluster and mirrors its status there.

    It keeps no state: jobs continue without it, and after a restart it handles the changes that it missed. A namespace
    that it cannot serve, because it is gone or its rights are, is reported and tried again; the others are served.

    [dim]perdure operator · perdure operator --namespace nlp --namespace vision[/]
    """
    from perdure.base.services import run_service
    from perdure.operator import reconcile, serve

    service = serve.serve(
        address=address,
        namespaces=namespaces or (),
        ownership=owners,
        backends=_backends(backend) if backend else reconcile.BACKENDS,
        health_port=health_port,
        metrics_port=metrics_port,
    )
    raise typer.Exit(run_service(service, logger=serve.logger, log_format=log_format))


async def _detach() -> None:
    from perdure.local.control_plane import LocalControlPlane

    plane = LocalControlPlane(report=say)
    endpoint = await plane.ensure()
    record = plane.status().worker
    out.print(f"Temporal server at {endpoint.address}, its UI at {endpoint.ui}")
    out.print(f"worker: process {record.pid if record else 'gone'}, log {plane.state.worker / 'worker.log'}")
    Session().hint("perdure doctor", "perdure worker --stop")


async def _stop() -> None:
    from perdure.local.control_plane import LocalControlPlane

    plane = LocalControlPlane(report=say)
    worker_ran = await plane.stop_worker()
    server_ran = await plane.stop_server()
    ran = [what for what, was in (("the worker", worker_ran), ("the Temporal server", server_ran)) if was]
    out.print(f"stopped {' and '.join(ran)}; nodes continue" if ran else "nothing was running")
    Session().hint("perdure worker --detach")


def doctor(*, here: ServerSession) -> None:
    """Check everything that a job needs, and print a remedy for everything that is missing.

    [dim]perdure doctor · perdure doctor -o json[/]
    """
    raise typer.Exit(run_async(_doctor(here)))


def _text_of(value: JsonValue) -> str:
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(str, value)) or "none"
        case _:
            return str(value)


async def _doctor(here: Session) -> int:
    from perdure.base.errors import ExitCode
    from perdure.cli.checks import Check, Verdict, run_checks

    styles = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}
    checks: list[Check] = []
    async for check in run_checks(here.address):
        checks.append(check)
        if not here.json:
            out.print(f"[{styles[check.verdict]}]{check.verdict:<8}[/][bold]{check.name:<24}[/] ", end="")
            out.print(check.detail, markup=False)
            if check.remedy:
                out.print(f"{'':<33}{check.remedy}", markup=False, style="dim")
            for name, value in check.facts.items():
                out.print(f"{'':<33}{name}: {_text_of(value)}", markup=False, style="dim")
    failed = [check.name for check in checks if check.verdict is Verdict.FAILED]
    if here.json:
        here.show(checks)
    elif failed:
        out.print(f"[bold red]{len(failed)} failed[/]: {', '.join(failed)}")
    else:
        here.hint("perdure run --nodes 2 -- torchrun train.py", "perdure list")
    if "temporal server" in failed:
        return ExitCode.UNREACHABLE
    return ExitCode.INFRASTRUCTURE if failed else ExitCode.OK
