"""Tests that a job puts no files of its own in the place of those that Perdure's containers run or read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubernetes.test_pod_manifest import container
from tests.security.test_site_policy import is_refused, made


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/opt/perdure/lib/python3.13/site-packages",
            "/opt/perdure",
            "/opt",
            "/",
            "//",
            "/./usr/lib",
            "/data/../usr/lib",
        ),
        *(
            "/usr/local/lib",
            "/etc",
            "/etc/ssl",
            "/lib64",
            "/proc/self",
            "/var",
            "/var/run/secrets",
            "/.local/lib",
            "/run",
        ),
        *("/perdure", "/perdure/run/x", "/perdure-agent", "/perdure-token", "/perdure-copies", "/perdure-archive"),
    ],
)
def test_the_volume_of_a_storage_hides_no_files_that_the_agent_runs_or_reads(path: str) -> None:
    stored = {"storage": f"{path.rstrip('/')}/checkpoints"}
    permissive = {"privileged": True, "host_paths": ["/"], "template_fields": ["metadata", "spec"]}
    volumes = [{"pvc": "own", "mount_path": path}]
    is_refused("no folder of Perdure's own containers", policy=permissive, checkpoint=stored, volumes=volumes)


@pytest.mark.parametrize(
    "path", ["/data", "/mnt/x", "/opt/ml/checkpoints", "/home/me", "/var/lib/saves", "/workspace", "/tmp/x"]
)
def test_the_agent_has_the_volume_of_the_storage(path: str) -> None:
    pod = made(checkpoint={"storage": f"{path}/checkpoints"}, volumes=[{"pvc": "own", "mount_path": path}])
    assert {"name": "volume-0", "mountPath": path} in container(pod, "perdure-agent")["volumeMounts"]


@pytest.mark.parametrize("name", ["perdure-prepare", "perdure-agent"])
def test_no_module_in_a_shared_folder_takes_the_place_of_our_own(name: str, tmp_path: Path) -> None:
    """The folder that training code writes to is `/perdure`, and containers begin in `/`."""
    shared = tmp_path / "perdure"
    (shared / "agent").mkdir(parents=True)
    (shared / "__init__.py").write_text("print('not ours')")
    (shared / "agent" / "__init__.py").touch()
    for module in ("__main__", "prepare"):
        (shared / "agent" / f"{module}.py").touch()
    interpreter, *arguments = container(made(), name)["command"]
    assert interpreter == "python3"
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert ran.returncode
    assert "PERDURE_" in ran.stderr
    assert ran.stdout == ""
