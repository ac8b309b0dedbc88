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


@pytest.mark.parametrize(
    ("script", "error"),
    [
        pytest.param(*parts, id=name, marks=[] if "before" in name else [pytest.mark.long("survival")])
        for name, parts in SCRIPTS.items()
    ],
)
async def test_it_is_tried_once_more_and_ends_with_its_traceback_once(site: Site, script: str, error: str):
    program = site.folder / "broken.py"
    program.write_text(script)
    command = ["torchrun", str(program)]
    job = await site.submit(nodes="1", recovery={"warm_starts": False}, command=command)
    result = await site.client.wait(job.name)
    incidents = await job.incidents()
    seen = [(incident.title, incident.evidence) for incident in incidents]
    assert (result.phase, result.exit_code, result.generations) == (JobPhase.FAILED, 1, 2), seen
    assert error in result.reason
    assert {incident.failure for incident in incidents} == {FailureClass.CANNOT_RUN}
    told = explanation(incidents[-1], job=job.name, flag="").plain
    assert told.count(f'File "{program}"') == 1


RAISES = """\
import torch
import torch.distributed as dist

from perdure_training import report

dist.init_process_group("gloo")
for step in range(1, 4):
    dist.all_reduce(torch.ones(1))
    report(step=step)
    print("step", step, "of rank", dist.get_rank(), flush=True)
if dist.get_rank() == 1:
    print("NET/IB : Got async event : port error", flush=True)
    raise ValueError("no batch 7")
dist.all_reduce(torch.ones(1))
"""
PORT_ERROR = "NET/IB : Got async event : port error"


@pytest.mark.long("survival")
async def test_the_same_error_at_the_same_step_stops_the_job_with_its_traceback(site: Site):
    program = site.folder / "raises.py"
    program.write_text(RAISES)
    job = await site.submit(nodes="2", command=["torchrun", str(program)])
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code, result.generations) == (JobPhase.FAILED, 1, 2)
    assert "it failed again after a restart (ValueError at raises.py:13): rank 1" in result.reason
    assert f'File "{program}", line 13' in result.log_tail
    first, second = await job.incidents()
    assert second.rule.startswith("same-error/1")
    assert PORT_ERROR in first.own_lines
    assert not [line for line in first.own_lines if line.startswith("step")]


@pytest.mark.long("survival")
async def test_a_rule_for_a_line_of_the_output_decides_at_once(site: Site):
    program = site.folder / "raises.py"
    program.write_text(RAISES)
    rule = {"match": {"log": "NET/IB.*port error"}, "action": "stop", "reason": "the card has failed"}
    job = await site.submit(nodes="2", command=["torchrun", str(program)], retry={"rules": [rule]})
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code, result.generations) == (JobPhase.FAILED, 1, 1)
    assert result.reason.endswith("retry.rules[0]: the card has failed")
    told = explanation((await job.incidents())[-1], job=job.name, flag="").plain
    assert 'rule retry-rule/1 "retry.rules[0]: the card has failed": stop the job' in told
    assert f"its output fits retry.rules[0]: {PORT_ERROR}" in told
