"""Tests of what a node on a machine of a scheduler waits for before its launcher and its agent start."""

from __future__ import annotations

import json
import subprocess
import sys

LOADED = "import json, sys, perdure.activities.nodes.ray.node; print(json.dumps(sorted(sys.modules)))"


def test_a_node_of_ray_starts_without_the_clients_of_temporal_and_http():
    printed = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    slow = {"temporalio.client", "aiohttp", "cryptography", "torch"}
    assert not slow & set(json.loads(printed))
