"""Fixtures for attacks on a real cluster, that of tests/kubernetes."""

from tests.kubernetes.conftest import cluster, job, own_cluster, results, temporal_client

__all__ = ["cluster", "job", "own_cluster", "results", "temporal_client"]
