"""Writes the definition of the resource, `deploy/crds/trainingjobs.yaml`, from the specification's models.

Run as `python -m perdure.operator.crd [FILE]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from perdure.operator.resource import GROUP, KIND, PLURAL, VERSION, Owner
from perdure.operator.status import ResourceStatus
from perdure.operator.structural import Schema, structural
from perdure.spec.job import Backend
from perdure.spec.roles import MAX_NODES
from perdure.spec.schema import json_schema

_HEAD = "# Generated from the specification's models: python -m perdure.operator.crd deploy/crds/trainingjobs.yaml\n"
_COLUMNS = (
    ("Phase", "string", ".status.phase", "The phase of the job."),
    ("Nodes", "string", ".status.nodes", "Nodes in the world, of those requested."),
    ("World", "integer", ".status.worldSize", "Ranks in the world."),
    ("Step", "integer", ".status.step", "The training step."),
    ("Restarts", "integer", ".status.restarts", "Restarts that count against retry.max_restarts."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the object was created."),
)
_WIDE_COLUMN = {
    "name": "Owner",
    "type": "string",
    "jsonPath": ".owner.username",
    "description": "The user who wrote the specification.",
    "priority": 1,
}
"""A column that only `kubectl get -o wide` shows."""
_NAME_IS_SHORT = {
    "rule": "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')",
    "message": "metadata.name: expected at most 63 lowercase letters, digits and inner hyphens",
}


def custom_resource_definition() -> dict[str, Any]:
    """The definition of the resource for the API server."""
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": description}
            for name, kind, path, description in _COLUMNS
        ]
        + [_WIDE_COLUMN],
        "schema": {"openAPIV3Schema": _schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": KIND, "plural": PLURAL, "singular": KIND.lower(), "shortNames": ["tj"]},
            "versions": [version],
        },
    }


def _schema() -> Schema:
    status = ResourceStatus.model_json_schema(by_alias=True, mode="validation")
    return {
        "type": "object",
        "description": "A distributed PyTorch training job that Perdure keeps running.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec_schema(),
            "owner": _owner_schema(),
            "status": _status_schema(structural(status, status.pop("$defs"), by_users=False)),
        },
        "x-kubernetes-validations": [_NAME_IS_SHORT],
    }


def _spec_schema() -> Schema:
    job = json_schema()
    properties: dict[str, Any] = job["properties"]
    del properties["name"], properties["namespace"]
    properties["backend"]["default"] = Backend.KUBERNETES.value
    job["$defs"]["Role"]["properties"]["suspend"] = {
        "type": "boolean",
        "description": "Whether the role releases its nodes while the others continue. Unset: perdure suspend --role "
        "decides.",
    }
    properties["suspend"] = {
        "type": "boolean",
        "default": False,
        "description": "Whether the job releases its nodes, or requests none yet; false lets it continue.",
    }
    properties["replicas"] = {
        "type": "integer",
        "format": "int32",
        "minimum": 0,
        "maximum": MAX_NODES,
        "description": "The number of nodes, instead of the role's nodes, as kubectl scale and autoscalers set it; "
        "of a range, the upper limit; of several roles, for the first that ends the job. 0 suspends the job.",
    }
    description = "The desired job, as in docs/spec.md; name and namespace are the object's own."
    return structural({**job, "required": ["roles"], "description": description}, job["$defs"])


def _owner_schema() -> Schema:
    schema = Owner.model_json_schema(by_alias=True, mode="validation")
    description = "The user who wrote spec. The cluster's admission policy records it; values of users are replaced."
    return structural({**schema, "description": description}, {}, by_users=False)


def _status_schema(schema: Schema) -> Schema:
    schema["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return schema


def document() -> str:
    """The definition as YAML."""
    return _HEAD + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=120, allow_unicode=True)


def main() -> None:
    """Writes the definition to the file that is named, or to standard output."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(document(), encoding="utf-8")
    else:
        sys.stdout.write(document())


if __name__ == "__main__":
    main()
