"""Tests of the Ray cluster that `deploy/ray` describes, by the fields of KubeRay's CRD and by a real API server.
KubeRay's operator cannot run here."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.activities.nodes.ray.settings import RaySettings
from scripts.cluster.cluster import Cluster
from scripts.ray_environment import RELEASE
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.test_deploy import DEPLOY, kubectl_says
from tests.kubernetes.test_gangs import definition

RAY = DEPLOY / "ray"

pytestmark = pytest.mark.long("cluster-faults")


def objects(folder: Path) -> dict[str, dict[str, Any]]:
    documents = (
        one for name in ("cluster", "worker") for one in yaml.safe_load_all((folder / f"{name}.yaml").read_text())
    )
    return {one["kind"]: one for one in documents}


def test_the_worker_s_variables_name_the_head_s_service_and_the_image_has_the_tested_release() -> None:
    found = objects(RAY)
    cluster, worker = found["RayCluster"], found["Deployment"]
    kustomization = yaml.safe_load((RAY / "kustomization.yaml").read_text())
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    settings = RaySettings.from_environment(variables, connection={})
    # KubeRay names the service after the cluster.
    service = f"{cluster['metadata']['name']}-head-svc.{kustomization['namespace']}.svc"
    assert settings.address == f"ray://{service}:10001"
    assert cluster["spec"]["rayVersion"] == RELEASE
    assert f"=={RELEASE}" in (RAY / "kustomization.yaml").read_text()


async def test_kuberay_s_schema_and_the_api_server_take_the_cluster_and_its_pods(
    own_cluster: Cluster, cluster: TestCluster, kubectl: Path, job: PodJob, tmp_path: Path
) -> None:
    folder = shutil.copytree(RAY, tmp_path / "ray")
    path = folder / "kustomization.yaml"
    path.write_text(path.read_text().replace("namespace: ray", f"namespace: {job.namespace}"))
    apply = ("apply", "--dry-run=server", "--validate=strict")
    async with definition(job, "kuberay-rayclusters.yaml"):
        taken = await kubectl_says(kubectl, *apply, "--kustomize", folder, kubeconfig=cluster.kubeconfig)
        assert taken.count("created (server dry run)") == 2

        spec = objects(folder)["RayCluster"]["spec"]
        for number, group in enumerate((spec["headGroupSpec"], *spec["workerGroupSpecs"])):
            metadata = {"name": f"ray-{number}", "namespace": job.namespace}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **group["template"]}
            (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
            taken = await kubectl_says(
                kubectl, *apply, "--filename", tmp_path / "pod.yaml", kubeconfig=cluster.kubeconfig
            )
            assert "created (server dry run)" in taken

        wrong = folder / "cluster.yaml"
        wrong.write_text(wrong.read_text().replace("minReplicas", "minimumReplicas"))
        process = await asyncio.create_subprocess_exec(
            *(str(kubectl), *apply, "--kustomize", str(folder)),
            env={**os.environ, "KUBECONFIG": cluster.kubeconfig},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, complaint = await process.communicate()
        assert 'unknown field "spec.workerGroupSpecs[0].minimumReplicas"' in complaint.decode()
