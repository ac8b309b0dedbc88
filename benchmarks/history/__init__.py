"""Measures the history events of jobs, and whether groups lose signals or leases when they continue as new."""
