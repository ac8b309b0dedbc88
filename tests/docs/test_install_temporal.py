"""Tests that the numbers of docs/install-kubernetes.md for Temporal's server and its database fit each other."""

from __future__ import annotations

from tests.docs.test_docs_numbers import told
from tests.support.configured_server import database_settings, pool_of_a_process, pools_of_all_processes, stores

GUIDE = "install-kubernetes.md"

IN_AN_UPGRADE = 2
"""Processes for each one: Kubernetes starts its successor first."""

RESERVED = 3
"""PostgreSQL's own `superuser_reserved_connections`."""


def test_the_pools_of_all_processes_fit_into_the_database_while_an_upgrade_replaces_them():
    assert IN_AN_UPGRADE * pools_of_all_processes() + RESERVED < int(database_settings()["max_connections"])


def test_each_store_has_what_the_server_does_not_start_without():
    for name, store in stores().items():
        assert {"pluginName", "databaseName", "connectAddr", "connectProtocol"} <= store.keys(), name


def test_each_store_has_a_pool_that_keeps_its_connections_for_a_bounded_time():
    for name, store in stores().items():
        assert 0 < store["maxIdleConns"] <= store["maxConns"], name
        assert store["maxConnLifetime"], name


def test_the_text_beside_the_configuration_has_its_numbers():
    assert told(GUIDE, r"for each of its two stores: (\d+) here") == pool_of_a_process()
    assert told(GUIDE, r"so PostgreSQL must take (\d+)") == IN_AN_UPGRADE * pools_of_all_processes()
    assert told(GUIDE, r"\(`replicaCount`\) allow (\d+) more") == IN_AN_UPGRADE * pool_of_a_process()
