"""Nodes as pods of a Kubernetes cluster."""

from perdure.activities.nodes.kubernetes.backend import KubernetesBackend
from perdure.activities.nodes.kubernetes.settings import KubernetesSettings

__all__ = ["KubernetesBackend", "KubernetesSettings"]
