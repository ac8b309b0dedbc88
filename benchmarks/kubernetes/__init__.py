"""What pods add: how soon a job recovers from what happens in a cluster, and what a thousand nodes of one job cost.

`python -m benchmarks.kubernetes --help` tells what can be chosen. It runs on the machine's own cluster, which it starts
where none runs, since it stops kubelets and kills the API server.
"""
