"""Tests of deployments beside the chart: the image that a Dockerfile describes, and the kustomizations."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from scripts.cluster import images
from scripts.cluster.cluster import Cluster
from scripts.kustomize import bases
from tests.kubernetes.pods import PodJob, TestCluster
from tests.support.allocation import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"


@pytest.mark.long("cluster-faults")
def test_the_dockerfile_says_what_the_tests_image_is(own_cluster: Cluster) -> None:
    config, files = contents(own_cluster.load_perdure_image().archive)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    build, final = stages((DEPLOY / "images" / "Dockerfile").read_text())

    assert final["USER"] == [config["User"]]
    assert json.loads(final["CMD"][0]) == config["Cmd"]
    environment = dict(word.split("=", 1) for line in final["ENV"] for word in shlex.split(line))
    assert without_path(environment) == without_path(dict(word.split("=", 1) for word in config["Env"]))

    copied = [line.split()[0] for line in build["COPY"] if (REPOSITORY / line.split()[0]).is_dir()]
    # Packages of perdure that lie beside it are copied, too: the links to them need their targets.
    linked = {path.resolve().name for path in (REPOSITORY / "perdure").iterdir() if path.is_symlink()}
    assert linked < set(copied)
    copied = [name for name in copied if name not in linked]
    assert copied == list(images.OUR_PACKAGES) == project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(name).name for name in files if name.startswith("usr/local/bin/")} >= project["project"][
        "scripts"
    ].keys()

    # tests/foundation/test_lock.py compares the lock with what the tests' image gets.
    assert "pip install --require-hashes --requirement requirements.lock" in build["RUN"]
    found = {re.match(r".*/site-packages/(.+)-([^-]+)\.dist-info/METADATA$", name) for name in files}
    installed = {(canonicalize_name(match[1]), match[2]) for match in found if match}
    expected = {(canonicalize_name(one.name), one.version) for one in images.dependencies()}
    assert installed == expected | {("perdure", project["project"]["version"])}


async def test_the_kustomizations_are_the_chart_and_the_api_server_takes_them(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, kubectl: Path, job: PodJob, tmp_path: Path
) -> None:
    for path, content in bases(helm).items():
        assert path.read_text() == content, f"{path} is not what the chart says: run `make kustomize`"

    shown = await kubectl_says(kubectl, "kustomize", KUSTOMIZE / "example")
    objects = {
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]): one
        for one in yaml.safe_load_all(shown)
    }
    (gateway,) = objects["Deployment", "perdure", "perdure-gateway"]["spec"]["template"]["spec"]["containers"]
    assert gateway["image"] == "registry.example/perdure:0.3.0"
    assert ("NetworkPolicy", "nlp", "perdure-jobs-network") in objects
    (container,) = objects["Deployment", "perdure", "perdure-worker"]["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert container["image"] == environment["PERDURE_KUBERNETES_AGENT_IMAGE"] == "registry.example/perdure:0.3.0"
    (subject,) = objects["RoleBinding", "nlp", "perdure-jobs-worker"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("perdure-worker", "perdure")
    assert ("ServiceAccount", "perdure", "perdure-worker") in objects

    operator = list(yaml.safe_load_all(await kubectl_says(kubectl, "kustomize", KUSTOMIZE / "operator")))
    assert {"CustomResourceDefinition", "Deployment", "ValidatingAdmissionPolicy"} <= {one["kind"] for one in operator}

    page = list(yaml.safe_load_all(await kubectl_says(kubectl, "kustomize", KUSTOMIZE / "page")))
    assert {"Deployment", "Service", "NetworkPolicy", "ClusterRole"} <= {one["kind"] for one in page}

    # Its namespaces are other people's here.
    copy = shutil.copytree(KUSTOMIZE, tmp_path / "kustomize")
    for path in copy.rglob("kustomization.yaml"):
        path.write_text(re.sub(r"^namespace: \w+", f"namespace: {job.namespace}", path.read_text(), flags=re.MULTILINE))
    taken = await kubectl_says(
        kubectl, "apply", "--dry-run=server", "--kustomize", copy / "example", kubeconfig=cluster.kubeconfig
    )
    assert taken.count("created (server dry run)") == len(objects)
    taken = await kubectl_says(
        kubectl, "apply", "--dry-run=server", "--kustomize", copy / "page", kubeconfig=cluster.kubeconfig
    )
    assert taken.count("created (server dry run)") == len(page)
    shutil.copytree(DEPLOY / "crds", tmp_path / "crds")
    taken = await kubectl_says(
        kubectl, "apply", "--dry-run=server", "--kustomize", copy / "operator", kubeconfig=cluster.kubeconfig
    )
    assert len(re.findall(r"(created|configured|unchanged) \(server dry run\)", taken)) == len(operator)


def contents(archive: Path) -> tuple[dict[str, Any], set[str]]:
    """An image's configuration, and the paths of its files."""
    with tarfile.open(archive) as image:

        def document(name: str) -> dict[str, Any]:
            file = image.extractfile(name)
            assert file
            return json.load(file)

        def blob(descriptor: dict[str, Any]) -> str:
            return f"blobs/sha256/{descriptor['digest'].removeprefix('sha256:')}"

        manifest = document(blob(document("index.json")["manifests"][0]))
        files: set[str] = set()
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=image.extractfile(blob(layer))) as tar:
                files |= set(tar.getnames())
        return document(blob(manifest["config"]))["config"], files


def stages(dockerfile: str) -> list[dict[str, list[str]]]:
    """Returns the arguments of each instruction, for each stage."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)).splitlines()
    found: list[dict[str, list[str]]] = []
    for line in filter(None, lines):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append({})
        if found:
            found[-1].setdefault(name, []).append(rest)
    return found


def without_path(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "PATH"}


async def kubectl_says(kubectl: Path, *words: str | Path, kubeconfig: str = "") -> str:
    process = await asyncio.create_subprocess_exec(
        *map(str, (kubectl, *words)),
        env={**os.environ, "KUBECONFIG": kubeconfig or os.devnull},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return out.decode()
