"""Tests of `perdure shell` in local nodes of a failed job that is held until it is released."""

from __future__ import annotations

import pytest

from perdure.client.sync import SyncClient
from perdure.contract import JobPhase
from tests.cli.test_cli_with_jobs import reaches
from tests.support.command_line import CommandLine

SPEC = """
name: {name}
hold_on_failure: 1h
env: {{MODEL: "llama 3"}}
retry: {{fatal_exit_codes: [7]}}
roles:
  worker:
    nodes: 2
    command: [sh, -c, '[ $RANK = 0 ] && sleep 600; touch failed-here; exit 7']
"""


@pytest.mark.long("commands")
def test_a_shell_in_a_failed_job_that_is_held_until_it_is_cancelled(
    command_line: CommandLine, jobs: SyncClient, job_name: str
) -> None:
    command_line.write("job.yaml", SPEC.format(name=job_name))
    assert command_line.run("submit", "job.yaml").code == 0
    reaches(jobs, job_name, JobPhase.HELD)
    status = command_line.run("status", job_name).out
    assert "HELD" in status
    assert "exit code 7 is listed in retry.fatal_exit_codes" in status
    assert f"perdure shell {job_name}" in status.splitlines()[-1]

    # By default in the node where it began, which is the second.
    shown = command_line.run("shell", job_name, "--", "sh", "-c", "ls; echo $MODEL; env | grep ^PERDURE_")
    assert shown.out.splitlines() == ["failed-here", "job.yaml", "llama 3"]
    printed = command_line.run("shell", job_name, "--node", "0", "--print").out
    assert f"{job_name}-worker-0-" in printed
    assert printed.rstrip().endswith("perdure_launcher shell")
    missing = command_line.run("shell", job_name, "--node", "2")
    assert "has no node 2 to enter; nodes that are there: 0, 1" in missing.err
    assert all(node.reachable for node in jobs.nodes(job_name))

    assert command_line.run("cancel", job_name).code == 0
    result = jobs.wait(job_name)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
    assert "hold_on_failure" in command_line.run("shell", job_name).err
