"""Benchmarks of the Kubernetes backend: time to recover from a cluster's faults, and the cost of a thousand nodes.

`python -m benchmarks.kubernetes --help` lists the options. It uses the machine's own cluster, and starts one if none
runs, since it stops kubelets and kills the API server.
"""
