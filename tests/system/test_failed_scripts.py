"""Tests of real scripts that cannot run: how often they are tried, and what is said of them."""

from __future__ import annotations

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, JobPhase
from tests.system.site import Site

SCRIPTS = {
    "a module is missing before torch is imported": (
        "import no_such_module",
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "its syntax is wrong": ("def train(:\n    pass", "SyntaxError: invalid syntax"),
    "a file is missing after torch was imported": (
        "import torch\nopen('no-such-file')",
        "FileNotFoundError: [Errno 2] No such file or directory: 'no-such-file'",
    ),
}


@pytest.mark.parametrize(("script", "error"), SCRIPTS.values(), ids=SCRIPTS)
async def test_it_is_tried_once_more_and_ends_with_its_traceback_once(site: Site, script: str, error: str):
    program = site.folder / "broken.py"
    program.write_text(script)
    job = await site.submit(nodes="1", command=["torchrun", str(program)])
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code, result.generations) == (JobPhase.FAILED, 1, 2)
    assert error in result.reason
    incidents = await job.incidents()
    assert {incident.failure for incident in incidents} == {FailureClass.CANNOT_RUN}
    told = explanation(incidents[-1], job=job.name, flag="").plain
    assert told.count(f'File "{program}"') == 1
