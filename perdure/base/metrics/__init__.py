"""Metrics of workers, agents and machines: their table, what reads them, and the endpoint for Prometheus."""
