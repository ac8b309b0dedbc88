"""Tests of runtime environments that Ray builds for a job's nodes on a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from perdure.contract import JobPhase
from scripts.ray_environment import interpreter
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import submitted
from tests.system.site import Site
from tests.system.test_ray_submitters import wheel

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(400)]

PROGRAMS = Path(__file__).with_name("ray_programs")
FINDS = (
    "import greeting, json, os, pathlib, sys\n"
    "pathlib.Path(sys.argv[1]).write_text(json.dumps([greeting.TEXT, sys.prefix, os.getcwd()]))\n"
)


async def found(site: Site, environment: dict[str, Any], **spec: Any) -> list[str]:
    """What a script finds in the environment: the text of a module, its interpreter's folder and its own."""
    (site.folder / "finds.py").write_text(FINDS)
    answer = site.folder / "found"
    given: dict[str, Any] = {"command": ["python", "finds.py", str(answer)]}
    job = await submitted(site, nodes="1", ray={"runtime_env": environment}, **given | spec)
    result = await site.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, await job.incidents()
    await job.wound_down()
    return json.loads(answer.read_text())


async def refused(site: Site, environment: dict[str, Any]) -> str:
    """What a job says whose environment Ray does not build."""
    job = await submitted(site, nodes="1", ray={"runtime_env": environment})
    result = await site.client.wait(job.name)
    assert result.phase is JobPhase.FAILED
    return str(await job.incidents())


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
    said = await refused(ray_site, {"uv": environment | {"packages": ["greeting==2.0"]}})
    assert "its ray.runtime_env cannot be built" in said
    assert "greeting==2.0" in said


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


@pytest.mark.parametrize("environment", ["training", {"dependencies": ["greeting"]}])
async def test_a_command_runs_in_an_environment_of_conda(cluster: RayCluster, ray_site: Site, environment: Any):
    # Not in the site's folder, which is uploaded.
    home = cluster.folder / "conda"
    stand_in_for_conda(home)
    await cluster.start(machines=0)
    await cluster.add(RAY_CONDA_HOME=str(home))
    text, prefix, _ = await found(ray_site, {"conda": environment})
    assert text == "from conda"
    assert prefix.startswith(str(home)) is (environment == "training")


@pytest.mark.parametrize("environment", ["training", {"dependencies": ["greeting"]}])
async def test_machines_without_conda_are_named_in_rays_words(cluster: RayCluster, ray_site: Site, environment: Any):
    await cluster.start(machines=1)
    said = await refused(ray_site, {"conda": environment})
    assert "its ray.runtime_env cannot be built" in said
    assert "Could not find Conda executable at" in said


def stand_in_for_conda(home: Path) -> None:
    """What Ray calls of a conda with an environment `training`, as no index here has conda: its environments are
    Python's own, with Ray of this one."""
    (home / "bin").mkdir(parents=True)
    (home / "etc" / "profile.d").mkdir(parents=True)
    (home / "etc" / "profile.d" / "conda.sh").write_text(
        f'conda() {{ case "$2" in /*) at="$2";; *) at={home}/envs/"$2";; esac; export PATH="$at/bin:$PATH"; }}\n'
    )
    packages = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    conda = home / "bin" / "conda"
    conda.write_text(
        f"""#!/bin/sh
        case "$1 $2" in
        "info --json") echo '{{"conda_prefix": "{home}", "envs": ["{home}/envs/training"]}}';;
        "env list") echo '{{"envs": []}}';;
        "env create")
            {interpreter()} -m venv --without-pip "$6"
            echo {interpreter().parent.parent}/{packages} > "$6/{packages}/ray.pth"
            echo "TEXT = 'from conda'" > "$6/{packages}/greeting.py";;
        esac
        """
    )
    conda.chmod(0o755)
    subprocess.run([conda, "env", "create", "--file", "-", "--prefix", home / "envs" / "training"], check=True)


async def test_an_environment_that_takes_too_long_is_named_with_its_limit(cluster: RayCluster, ray_site: Site):
    plugins = json.dumps([{"class": "slow_environment.SlowEnvironment"}])
    await cluster.start(machines=0)
    await cluster.add(PYTHONPATH=str(PROGRAMS), RAY_RUNTIME_ENV_PLUGINS=plugins)
    begun = ray_site.folder / "begun"
    said = await refused(ray_site, {"slow": str(begun), "config": {"setup_timeout_seconds": 2}})
    assert begun.exists()
    assert "its ray.runtime_env cannot be built" in said
    assert "within the timeout of 2 seconds; raise config.setup_timeout_seconds in it" in said


async def test_an_environment_that_ray_does_not_take_is_refused_in_its_words(cluster: RayCluster, ray_site: Site):
    await cluster.start(machines=1)
    said = await refused(ray_site, {"working_dir": "s3://bucket/code"})
    assert "Ray takes no such ray.runtime_env" in said
    assert ".zip" in said
