"""Tests of files for other submitters of Ray jobs: `perdure import --run` runs them on a real cluster to their end."""

from __future__ import annotations

import asyncio
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.contract import JobPhase
from tests.support.command_line import PERDURE
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import ACTORS, GROUPS, asked
from tests.system.site import Site

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(400)]

NEEDS_PACKAGE = "import pathlib, sys, greeting\npathlib.Path(sys.argv[1]).write_text(greeting.TEXT)\n"
SCRIPT = (
    "import os, pathlib, sys\npathlib.Path(sys.argv[1]).write_text(os.getcwd() + ' ' + os.environ['RAY_ADDRESS'])\n"
)


def submission(folder: Path, command: str) -> dict[str, Any]:
    """The file of DLRover's submitter."""
    return {"dashboardUrl": "http://localhost:8265", "command": command, "workingDir": str(folder)}


def ray_job(folder: Path, command: str) -> dict[str, Any]:
    """KubeRay's RayJob."""
    container = {"name": "ray-worker", "image": "rayproject/ray:2.60.0", "resources": {"limits": {"cpu": "1"}}}
    template = {"spec": {"containers": [container]}}
    cluster = {
        "headGroupSpec": {"rayStartParams": {}, "template": template},
        "workerGroupSpecs": [{"groupName": "small", "replicas": 1, "rayStartParams": {}, "template": template}],
    }
    runtime = yaml.safe_dump({"working_dir": str(folder)})
    spec = {"entrypoint": command, "runtimeEnvYAML": runtime, "rayClusterSpec": cluster}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "imported"}, "spec": spec}


def wheel(folder: Path) -> None:
    """A package that no index has."""
    about = "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n"
    made = {
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "METADATA": about,
    }
    with zipfile.ZipFile(folder / "greeting-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("greeting.py", "TEXT = 'from the wheel'\n")
        for name, content in made.items():
            archive.writestr(f"greeting-1.0.dist-info/{name}", content)
        archive.writestr("greeting-1.0.dist-info/RECORD", "")


async def imported(content: dict[str, Any], folder: Path) -> tuple[int | None, str]:
    """Runs a file to its end; returns the exit code, and what was printed."""
    file = folder / "imported.yaml"
    file.write_text(yaml.safe_dump(content))
    process = await asyncio.create_subprocess_exec(
        *(*PERDURE, "import", "--run", str(file)),
        env={**os.environ, "TEMPORAL_ADDRESS": ""},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    return process.returncode, printed.decode()


@pytest.mark.parametrize("written", [submission, ray_job])
async def test_a_job_that_was_written_for_ray_runs_on_ray_to_its_end(
    cluster: RayCluster, ray_site: Site, tmp_path: Path, written: Any
):
    await cluster.start(machines=1)
    code, found = tmp_path / "code", tmp_path / "found"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    exit_code, printed = await imported(written(code, f"python train.py {found}"), tmp_path)
    assert exit_code == 0, printed
    if written is submission:
        assert f"runs on the Ray cluster {cluster.address}, which http://localhost:8265 names" in printed
    folder, address = found.read_text().split()
    # The folder was uploaded, and Ray names its head in its own way.
    assert (Path(folder).name, address.rpartition(":")[2]) == ("workdir", str(cluster.port))
    (job,) = await ray_site.client.list()
    assert job.phase is JobPhase.SUCCEEDED
    assert await asked(cluster, ACTORS) == []
    assert await asked(cluster, GROUPS) == []


@pytest.mark.parametrize("requirement", ["greeting==1.0", "greeting==2.0"])
async def test_the_requirements_of_a_submission_are_installed_or_their_failure_is_told_in_pips_words(
    cluster: RayCluster, ray_site: Site, tmp_path: Path, requirement: str
):
    await cluster.start(machines=1)
    code, found, wheels = tmp_path / "code", tmp_path / "found", tmp_path / "wheels"
    for folder in (code, wheels):
        folder.mkdir()
    wheel(wheels)
    (code / "train.py").write_text(NEEDS_PACKAGE)
    # No index: pip takes them from a folder that the machines see.
    requirements = ["--no-index", f"--find-links {wheels}", requirement]
    content = submission(code, f"python train.py {found}") | {"requirements": requirements}
    exit_code, printed = await imported(content, tmp_path)
    (job,) = await ray_site.client.list()
    if requirement == "greeting==1.0":
        assert exit_code == 0, printed
        assert found.read_text() == "from the wheel"
        assert job.phase is JobPhase.SUCCEEDED
    else:
        assert exit_code not in (0, None)
        assert "its ray.runtime_env cannot be built" in printed
        assert "No matching distribution found for greeting==2.0" in printed
        assert job.phase is JobPhase.FAILED
    assert await asked(cluster, ACTORS) == []
    assert await asked(cluster, GROUPS) == []
