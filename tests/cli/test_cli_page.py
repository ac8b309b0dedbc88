"""Tests of the commands that show jobs in a browser and as files, on a real job."""

from __future__ import annotations

import secrets
import signal
import sys
import urllib.request
from http.cookiejar import CookieJar
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from perdure.cli.main import app
from perdure.client.sync import SyncClient
from tests.support.command_line import CommandLine

SCRIPT = """
import time
from perdure_training import report
for step in range(1, 9):
    report(step=step, loss=1 / step, total=8)
    time.sleep(0.3)
"""


@pytest.mark.long("page")
def test_a_job_has_a_page_a_report_and_plots(command_line: CommandLine, jobs: SyncClient) -> None:
    name = f"page-{secrets.token_hex(3)}"
    (command_line.folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(command_line.folder / "train.py")]
    jobs.submit({"name": name, "backend": "local", "roles": {"worker": {"nodes": 1, "command": command}}})
    result = jobs.wait(name)
    assert result.phase == "SUCCEEDED"

    reported = command_line.run("report", name, "-o", "report.html")
    assert reported.code == 0, reported.err
    page = (command_line.folder / "report.html").read_text()
    assert "SUCCEEDED" in page
    assert "train.py" in page, "its specification"

    plotted = command_line.run("plot", name, "--what", "loss,steps", "-o", "course.svg")
    assert plotted.code == 0, plotted.err
    root = ElementTree.fromstring((command_line.folder / "course.svg").read_text())
    lines = [one for one in root if one.get("class") == "line"]
    assert len(lines) == 2, "steps and losses that the agent has sampled"
    assert command_line.run("plot", name, "--what", "speed").code == 2
    assert command_line.run("plot", name, "-o", "course.png").code == 0
    assert (command_line.folder / "course.png").read_bytes().startswith(b"\x89PNG")
    refused = command_line.run("plot", name, "-o", "course.gif")
    assert (refused.code, ".svg, .png or .pdf" in refused.err) == (2, True)

    server = command_line.start("ui", "--port", "0")
    try:
        assert server.stdout is not None
        link = server.stdout.readline().strip()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        assert name in browser.open(link, timeout=30).read().decode()
        job = link.partition("?")[0] + f"jobs/default/{name}/"
        assert "SUCCEEDED" in browser.open(job, timeout=30).read().decode()
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--url", "http://gate.example"], "must not cross a network unencrypted"),
        (["--url", "gate.example"], "expected one such as"),
        (["--tls-key", "key.pem"], "name both files"),
    ],
)
def test_a_site_s_page_is_served_in_no_unsafe_way(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["page", *options])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())
