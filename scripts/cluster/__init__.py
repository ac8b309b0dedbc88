"""A real Kubernetes cluster on one Linux machine, without Docker: for the tests, the demo and the benchmarks.

A mocked API server accepts what the real one refuses, and no mock has a kubelet that kills containers over their memory
limit. So Perdure's pods are tested here: etcd, API server with RBAC, controller manager, scheduler, two nodes with a
kubelet, containerd and CNI each, and KWOK for nodes that exist only in the API.

It is in `scripts/` because the tests are not its only user. It needs nothing of Perdure itself.
"""
