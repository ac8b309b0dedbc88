"""Nodes as pods of a Kubernetes cluster."""

from activities.nodes.kubernetes.backend import KubernetesBackend
from activities.nodes.kubernetes.settings import KubernetesSettings

__all__ = ["KubernetesBackend", "KubernetesSettings"]
