"""Attacks on a real cluster: the one of tests/kubernetes."""

from tests.kubernetes.conftest import (
    cluster,
    helm,
    job,
    kubectl,
    own_cluster,
    pytest_collection_modifyitems,
)

__all__ = ["cluster", "helm", "job", "kubectl", "own_cluster", "pytest_collection_modifyitems"]
