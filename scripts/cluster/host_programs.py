"""Training containers that use this machine's Python and torch: 5 GB that no test image has to contain again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scripts.cluster.images import host_mounts

_NO_NAMES = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
"""The cluster has no name server, but torch queries one for the name of each address that it connects to. Nothing
listens at this address, so each query is refused at once instead of after 10 seconds."""


SITE_POLICY = "host_paths: [/]\nrun_as_root: true\n"
"""The site policy that such pods need: they mount folders of the machine, and root alone may read some of them."""


def with_host_programs(*writable: Path) -> dict[str, Any]:
    """Returns a pod template that mounts this Python environment, read-only, and folders for results."""
    folders = [*((path, True) for path in host_mounts()), *((path, False) for path in writable)]
    mounts = [
        {"name": f"host-{index}", "mountPath": str(path), "readOnly": read_only}
        for index, (path, read_only) in enumerate(folders)
    ]
    volumes = [{"name": f"host-{index}", "hostPath": {"path": str(path)}} for index, (path, _) in enumerate(folders)]
    programs = dict.fromkeys(str(Path(prefix) / "bin") for prefix in (sys.prefix, sys.base_prefix))
    path = ":".join([*programs, "/usr/bin", "/bin"])
    training = {"name": "training", "volumeMounts": mounts, "env": [{"name": "PATH", "value": path}]}
    as_root = {"runAsUser": 0, "runAsGroup": 0}
    return {"spec": {"containers": [training], "volumes": volumes, "securityContext": as_root, **_NO_NAMES}}
