"""Tests of runtime environments that Ray builds for a job's nodes on a real cluster."""

from __future__ import annotations

import json
import zipfile
from typing import Any

import pytest

from perdure.contract import JobPhase
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import submitted
from tests.system.site import Site
from tests.system.test_ray_submitters import wheel

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(400)]

FINDS = (
    "import greeting, json, os, pathlib, sys\n"
    "pathlib.Path(sys.argv[1]).write_text(json.dumps([greeting.TEXT, sys.prefix, os.getcwd()]))\n"
)


async def found(site: Site, environment: dict[str, Any], **spec: Any) -> list[str]:
    """What a script finds in the environment: the text of a module, its interpreter's folder and its own."""
    (site.folder / "finds.py").write_text(FINDS)
    answer = site.folder / "found"
    spec = {"command": ["python", "finds.py", str(answer)]} | spec
    job = await submitted(site, nodes="1", ray={"runtime_env": environment}, **spec)
    result = await site.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, await job.incidents()
    await job.wound_down()
    return json.loads(answer.read_text())


async def test_packages_of_uv_are_those_of_the_command(cluster: RayCluster, ray_site: Site):
    wheels = ray_site.folder / "wheels"
    wheels.mkdir()
    wheel(wheels)
    await cluster.start(machines=1)
    options = ["--no-index", "--find-links", str(wheels), "--no-cache"]
    environment = {"packages": ["greeting==1.0"], "uv_pip_install_options": options}
    text, prefix, _ = await found(ray_site, {"uv": environment})
    assert text == "from the wheel"
    assert "/runtime_resources/uv/" in prefix


async def test_modules_are_found_by_the_command(cluster: RayCluster, ray_site: Site):
    package = ray_site.folder / "lib.zip"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("lib/greeting.py", "TEXT = 'from the module'\n")
    await cluster.start(machines=1)
    text, _, _ = await found(ray_site, {"py_modules": [f"file://{package}"]})
    assert text == "from the module"


async def test_a_working_folder_is_where_the_command_runs(cluster: RayCluster, ray_site: Site):
    package = ray_site.folder / "code.zip"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("code/greeting.py", "TEXT = 'from the folder'\n")
        archive.writestr("code/finds.py", FINDS)
    await cluster.start(machines=1)
    text, _, folder = await found(ray_site, {"working_dir": f"file://{package}"}, workdir=None)
    assert text == "from the folder"
    assert "/working_dir_files/" in folder
