"""Tests of presets on a real cluster: a user says what to run, and the site's ConfigMap says how."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.base.errors import Refused
from perdure.contract import JobPhase
from scripts.cluster.cluster import Cluster
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster, with_host_programs
from tests.kubernetes.site import perdure


async def test_a_job_runs_as_its_preset_says(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    content = {
        "job": {"env": {"SITE": "preset", "BOTH": "preset"}, "labels": {"team": "vision"}},
        "role": {"image": BARE_IMAGE, "pod_template": with_host_programs(tmp_path)},
        "allow": ["spec.nodeSelector"],
    }
    await job.api.create(
        job.anchors_path,
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "site-efa", "labels": {"perdure.dev/runtime": "efa"}},
            "data": {"preset.yaml": yaml.safe_dump(content)},
        },
    )
    async with perdure(cluster, job.namespace, presets_namespace=job.namespace) as (_, client):

        async def submitted(role: dict[str, Any] | None = None, **fields: Any) -> str:
            name = f"r-{secrets.token_hex(4)}"
            command = ["sh", "-c", f'echo "$SITE $BOTH" > {tmp_path}/said']
            role = {"nodes": 1, "nproc_per_node": 1, "command": command, **(role or {})}
            job_fields = {"name": name, "namespace": job.namespace, "backend": "kubernetes", "runtime": "efa"}
            await client.submit({**job_fields, "env": {"BOTH": "user"}, "roles": {"worker": role}, **fields})
            return name

        with pytest.raises(Refused, match=r'runtime: got "eva"; unknown preset; did you mean "efa"\?'):
            await client.wait(await submitted(runtime="eva"))
        name = await submitted({"pod_template": {"spec": {"hostNetwork": True}}})
        with pytest.raises(Refused, match=f"spec.hostNetwork may not be set .* {job.namespace}/site-efa"):
            await client.wait(name)
        name = await submitted({"pod_template": {"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}})
        result = await client.wait(name)
        assert result.phase is JobPhase.SUCCEEDED, result
        assert (tmp_path / "said").read_text() == "preset user\n"
