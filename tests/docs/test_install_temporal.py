"""Tests that the numbers of docs/install-kubernetes.md for Temporal's server and its database fit each other."""

from __future__ import annotations

from tests.support.configured_server import database_settings, pools_of_all_processes, stores

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
