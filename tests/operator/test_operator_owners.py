"""Tests of what a job names, and of the Events about it, on values only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.operator import status as statuses
from perdure.operator.events import occurrences
from perdure.operator.references import references
from perdure.operator.status import Observed, ResourceStatus, Truth
from perdure.spec.validate import validate_spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def named(template: dict[str, Any] | None = None, role: dict[str, Any] | None = None, **spec: Any) -> set[str]:
    worker = {"nodes": 1, "command": ["true"], "image": "acme/llama", **(role or {})}
    worker["pod_template"] = {"spec": template or {}}
    job, _ = validate_spec({"name": "llama", "backend": "kubernetes", "roles": {"worker": worker}, **spec})
    return {f"{one.kind.resource}/{one.name}" for one in references(job)}


def container(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "training", **fields}]}


def volume(**fields: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "data", **fields}]}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({}, set()),
        ({"serviceAccountName": "default"}, set()),
        ({"serviceAccountName": "cloud"}, {"serviceaccounts/cloud"}),
        ({"serviceAccount": "cloud"}, {"serviceaccounts/cloud"}),
        ({"imagePullSecrets": [{"name": "a"}, {"name": "b"}]}, {"secrets/a", "secrets/b"}),
        (container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k"}}}]), {"secrets/a"}),
        (container(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "a"}}}]), {"configmaps/a"}),
        (
            container(envFrom=[{"secretRef": {"name": "a"}}, {"configMapRef": {"name": "b"}}]),
            {"secrets/a", "configmaps/b"},
        ),
        ({"initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "a"}}]}]}, {"secrets/a"}),
        (volume(secret={"secretName": "a"}), {"secrets/a"}),
        (volume(configMap={"name": "a"}), {"configmaps/a"}),
        (volume(projected={"sources": [{"secret": {"name": "a"}}]}), {"secrets/a"}),
        # The API server drops the key that it does not know, and the other one counts.
        (volume(projected={"sources": [{"secret": {"name": "a", "secretName": "b"}}]}), {"secrets/a", "secrets/b"}),
        (volume(persistentVolumeClaim={"claimName": "a"}), {"persistentvolumeclaims/a"}),
        (volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "a"}}), {"secrets/a"}),
        (volume(flexVolume={"secretRef": {"name": "a"}}), {"secrets/a"}),
        (volume(azureFile={"secretName": "a"}), {"secrets/a"}),
        ({"resourceClaims": [{"name": "gpu", "resourceClaimName": "a"}]}, {"resourceclaims/a"}),
        ({"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "a"}]}, {"resourceclaimtemplates/a"}),
        (
            volume(
                ephemeral={
                    "volumeClaimTemplate": {"spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "a"}}}
                }
            ),
            {"persistentvolumeclaims/a"},
        ),
        (
            volume(ephemeral={"volumeClaimTemplate": {"spec": {"dataSourceRef": {"kind": "Disk", "name": "a"}}}}),
            {"pods/a"},
        ),
        # Forms that no pod has name nothing, and do no harm.
        ({"containers": "none", "volumes": {"secret": None}, "serviceAccountName": 3}, set()),
    ],
)
def test_a_pod_template_names_objects_wherever_it_may(template: dict[str, Any], expected: set[str]) -> None:
    assert named(template) == expected


def test_a_job_names_objects_outside_of_its_template() -> None:
    found = named(
        role={"image_pull_secrets": ["registry"]},
        secrets={"TOKEN": "hub/token", "OTHER": "hub/other"},
        volumes=[{"mount_path": "/data", "pvc": "corpus"}],
        notifications={
            "chat": {"when": ["completion"], "webhook": {"url_secret": "slack/url", "token": "bot/token"}},
            "pager": {"when": ["completion"], "webhook": {"url": "https://pager.example", "signing_key": "pager/key"}},
        },
    )
    secrets = {f"secrets/{name}" for name in ("registry", "hub", "slack", "bot", "pager")}
    assert found == secrets | {"persistentvolumeclaims/corpus"}


def test_a_job_names_the_upload_that_another_user_may_have_made() -> None:
    name = "perdure-workdir-0123456789abcdef"
    archive = {"name": name, "parts": 2, "digest": "sha256:" + "0" * 64}
    found = named(workdir={"path": "/home/ann/code", "archive": archive})
    assert found == {f"configmaps/{name}", f"configmaps/{name}-0", f"configmaps/{name}-1"}


def test_each_change_that_people_should_notice_is_one_event() -> None:
    new = ResourceStatus()
    refused = statuses.refused_status(new, "Forbidden", "no right", Observed(1, NOW))
    [refusal] = occurrences(new, refused)
    assert (refusal.reason, refusal.message, refusal.warning) == ("Refused", "Forbidden: no right", True)
    assert occurrences(refused, statuses.refused_status(refused, "Forbidden", "no right", Observed(2, NOW))) == ()

    started = statuses.update_status(
        statuses.accepted_status(refused, "", Observed(2, NOW)), run_id="r", workflow_id="w", phase="STARTING"
    )
    assert [one.reason for one in occurrences(refused, started)] == ["Submitted"]
    running = statuses.with_condition(started, "Running", Truth.TRUE, "Running", "", Observed(2, NOW))
    running = statuses.update_status(running, nodes="2/2", world_size=16)
    [runs] = occurrences(started, running)
    assert (runs.reason, runs.message) == ("Running", "All members of the world step: 2/2 nodes, 16 ranks")
    assert occurrences(running, statuses.update_status(running, step=10)) == ()

    broken = statuses.update_status(running, last_incident="#1 rank 3 failed")
    [incident] = occurrences(running, broken)
    assert (incident.reason, incident.message, incident.warning) == ("Incident", "#1 rank 3 failed", True)
    repaired = statuses.update_status(broken, last_incident="#1 rank 3 failed; stepping again after 0.5 s")
    assert occurrences(broken, repaired) == ()

    failed = statuses.with_condition(repaired, "Failed", Truth.TRUE, "UserCode", "exit 7", Observed(2, NOW))
    [end] = occurrences(repaired, statuses.update_status(failed, phase="FAILED", finished_at=NOW))
    assert (end.reason, end.message, end.warning) == ("Failed", "exit 7", True)
    [end] = occurrences(repaired, statuses.update_status(repaired, phase="SUCCEEDED", finished_at=NOW, restarts=1))
    assert (end.reason, end.message, end.warning) == (
        "Succeeded",
        "The command has ended with 0 on all nodes; restarts: 1",
        False,
    )
