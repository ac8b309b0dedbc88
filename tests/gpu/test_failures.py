"""What `perdure explain` says of jobs that a GPU's error ended."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, IncidentView, JobPhase
from perdure.workflows.policy.diagnosis.error_texts import is_hardware
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Site

BEGIN = """\
from datetime import timedelta

import torch
import torch.distributed as dist

from perdure_training import report

dist.init_process_group("{backend}", timeout=timedelta(seconds=5))
summed = torch.ones(1, device="cuda")
dist.all_reduce(summed)
torch.cuda.synchronize()
report(step=1)
"""
OUT_OF_MEMORY = "kept = [torch.empty(1 << 34, device='cuda') for _ in range(100)]"
ASSERTION = "torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')]\ntorch.cuda.synchronize()"
ILLEGAL_ACCESS = """\
import triton
import triton.language as tl

@triton.jit
def write_far_away(pointer):
    tl.store(pointer + (1 << 40), 1.0)

write_far_away[(1,)](summed)
torch.cuda.synchronize()
"""
LATE = "torch.cuda._sleep(1 << 35)\ndist.all_reduce(summed)\ntorch.cuda.synchronize()"

FAULTS = {
    "out of memory": (OUT_OF_MEMORY, FailureClass.DEVICE_OUT_OF_MEMORY, "CUDA out of memory"),
    "device-side assertion": (ASSERTION, FailureClass.DEVICE_FAULT, "device-side assert triggered"),
    "illegal access": (ILLEGAL_ACCESS, FailureClass.DEVICE_FAULT, "illegal memory access"),
}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(("fault", "failure", "words"), FAULTS.values(), ids=FAULTS)
async def test_an_error_of_the_gpu_is_named(
    site: Site, backend: str, fault: str, failure: FailureClass, words: str
) -> None:
    job = await submit(site, backend, fault)
    incident = await first_incident(site, job.name)
    told = explanation(incident, job=job.name, flag="").plain
    print(told)
    assert incident.failure is failure
    assert words in told
    result = await site.client.wait(job.name)
    print(result.reason)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
    assert words in result.reason


async def test_the_kernels_message_of_a_scripts_own_error_means_no_broken_hardware(
    site: Site, figures: dict[str, Any]
) -> None:
    """A broken GPU cannot be had: this shows the form in which the driver tells an XID, here that of a page fault."""
    before = kernel_messages()
    job = await submit(site, "nccl", ILLEGAL_ACCESS)
    await site.client.wait(job.name)
    [message, *_] = [line for line in kernel_messages()[len(before) :] if "Xid" in line]
    figures["the kernel's message of an illegal access"] = message
    assert re.search(r"NVRM: Xid \(PCI:[0-9a-f:]+\): 31, pid=\d+, name=", message)
    assert not is_hardware(message)
    assert is_hardware(message.replace(": 31,", ": 79,"))


def kernel_messages() -> list[str]:
    return subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout.splitlines()


async def test_a_collective_that_the_watchdog_of_nccl_ends_is_named(site: Site) -> None:
    job = await submit(site, "nccl", LATE)
    incident = await first_incident(site, job.name)
    told = explanation(incident, job=job.name, flag="").plain
    print(told)
    assert incident.failure is FailureClass.COLLECTIVE_TIMEOUT
    assert "Watchdog caught collective operation timeout" in told


async def submit(site: Site, backend: str, fault: str) -> Any:
    program = site.folder / "faulty.py"
    program.write_text(f"{BEGIN.format(backend=backend)}{fault}\n")
    return await site.submit(nodes="1", command=["torchrun", str(program)])


async def first_incident(site: Site, job: str) -> IncidentView:
    """The first incident, once it has an explanation."""

    async def found() -> IncidentView | None:
        incidents = await site.client.incidents(job)
        return incidents[0] if incidents and incidents[0].failure is not None else None

    return await eventually(found, within=PATIENCE)
