"""Tests of a worker of root whose bridge runs as the user that runs Ray: what jobs of the cluster can do in it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scripts.ray_environment import interpreter
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import asked, nothing_is_left, submitted
from tests.system.site import WALK, Site
from tests.system.test_ray_adversary import IMITATE

pytestmark = [
    pytest.mark.long("ray"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of another user"),
]

USER = "nobody"
TRIES = """
import json, os
found = {{"user": os.geteuid(), "groups": os.getgroups()}}
tries = {{
    "variables": lambda: open(f"/proc/{{os.getppid()}}/environ").read(),
    "memory": lambda: open(f"/proc/{{os.getppid()}}/mem").close(),
    "keys": lambda: open({keys!r}).read(),
    "end": lambda: os.kill(os.getppid(), 15),
    "become": lambda: os.setuid(0),
}}
for name, attempt in tries.items():
    try:
        attempt()
        found[name] = "done"
    except OSError as error:
        found[name] = type(error).__name__
open({path!r} + ".part", "w").write(json.dumps(found))
os.rename({path!r} + ".part", {path!r})
"""
"""What an answer of another job's actor tries where the bridge reads it."""


def reachable(home: Path) -> tuple[Path, Path]:
    """Returns the interpreters with Ray and with Perdure in a folder that every user reaches: those of tests lie in
    root's. Their files are links, and nothing is copied."""
    base, venv = Path(sys.base_prefix), interpreter().parent.parent
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    unused = shutil.ignore_patterns("site-packages", "test")
    shutil.copytree(base / "lib" / version, home / "base" / "lib" / version, copy_function=os.link, ignore=unused)
    for file in (base / "bin" / version, *(base / "lib").glob("libpython*.so*")):
        linked = home / "base" / file.relative_to(base)
        linked.parent.mkdir(exist_ok=True)
        os.link(file, linked, follow_symlinks=True)
    shutil.copytree(venv, home / "ray", copy_function=os.link, symlinks=True, ignore=unused_scripts)
    (home / "ray" / "bin").mkdir()
    (home / "ray" / "bin" / "python").symlink_to(home / "base" / "bin" / version)
    (home / "ray" / "pyvenv.cfg").write_text(f"home = {home}/base/bin\n")
    node = home / "bin" / "python"
    node.parent.mkdir()
    packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    node.write_text(f'#!/bin/sh\nexport PYTHONPATH={REPOSITORY}:{packages}\nexec {home}/base/bin/{version} "$@"\n')
    node.chmod(0o755)
    return home / "ray" / "bin" / "python", node


def unused_scripts(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name in ("bin", "pyvenv.cfg", "lib64")}


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that every user reaches, with a short path."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def tmp_path(home: Path) -> Path:
    """The site's folder: agents of the other user read the payload keys in it."""
    folder = home / "site"
    folder.mkdir()
    return folder


@pytest.fixture
async def cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RayCluster]:
    """A cluster of another user than the worker's."""
    them = pwd.getpwnam(USER)
    ray, node = reachable(home)
    files = home / "r"
    files.mkdir()
    os.chown(files, them.pw_uid, them.pw_gid)
    # Of the interpreter, whose own path of it lies in root's folder.
    library = {"LD_LIBRARY_PATH": str(home / "base" / "lib")}
    monkeypatch.setenv("LD_LIBRARY_PATH", library["LD_LIBRARY_PATH"])
    cluster = RayCluster(files, head_cpus=1, python=ray, user=USER, variables={"HOME": str(files), **library})
    monkeypatch.setenv("PERDURE_RAY_USER", USER)
    cluster.node_python = node
    try:
        yield cluster
    finally:
        await cluster.stop()


async def test_code_of_another_job_in_the_bridge_is_that_of_rays_user(cluster: RayCluster, ray_site: Site):
    await cluster.start_head()
    ray_site.state.path.chmod(0o711)
    for file in ray_site.state.path.glob("payload-keys*"):
        shutil.chown(file, group=pwd.getpwnam(USER).pw_gid)
        file.chmod(0o640)
    out = cluster.folder / "out"
    out.mkdir()
    shutil.chown(out, USER)
    job = await submitted(ray_site, nodes="1", workdir=None, command=["python", str(WALK), str(out)], out=out)
    await job.running(nodes=1)
    keys, ran = ray_site.folder / "keys", out / "ran"
    keys.write_text("of the gateway")
    keys.chmod(0o600)
    code = IMITATE.replace(
        "(f\"import os; open({path!r}, 'w').write(' '.join([str(os.getppid()), *os.environ]))\",)",
        repr((TRIES.format(keys=str(keys), path=str(ran)), {})),
    )
    half = f"{job.name}-worker-8-{job.uid}1"
    for name, value in {"name": f"{job.name}-worker-7-{job.uid}1", "half": half}.items():
        code = code.replace(f"{{{name}!r}}", repr(value))
    assert await asked(cluster, code)
    await eventually(ran.exists, what="code in the bridge")
    found = json.loads(ran.read_text())
    them = pwd.getpwnam(USER)
    assert found == {
        "user": them.pw_uid,
        "groups": [them.pw_gid],
        **dict.fromkeys(("variables", "memory", "keys", "end", "become"), "PermissionError"),
    }
    await job.undisturbed(ranks=1, seconds=2)
    assert await asked(cluster, f"ray.kill(ray.get_actor({half!r}))\nfound = True")
    await ray_site.end_jobs()
    await job.wound_down()
    await nothing_is_left(cluster, job)
