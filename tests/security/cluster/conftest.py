"""Fixtures for attacks on a real cluster, that of tests/kubernetes."""

from tests.kubernetes.conftest import (
    cluster,
    helm,
    job,
    kubectl,
    own_cluster,
    pytest_collection_modifyitems,
    results,
)

__all__ = ["cluster", "helm", "job", "kubectl", "own_cluster", "pytest_collection_modifyitems", "results"]
