"""A real Kubernetes cluster on one Linux machine, without docker: for the tests, the demo and the benchmarks.

A mocked API server accepts what the real one refuses, and no mock has a kubelet that kills what exceeds its memory. So
what Perdure says about pods is tried here: etcd, API server with RBAC, controller manager, scheduler, two nodes of
kubelet, containerd and CNI each, and KWOK for nodes that only exist in the API.

It stands in `scripts/`, since the tests are not its only user, and it needs nothing of Perdure itself.
"""
