"""Enters the machine of a node, and becomes one of the node's two processes there: `enter.py MODULE`."""

import json
import os
import sys
from pathlib import Path

folder = Path(os.environ["FAULTS_MACHINES"])
node = int(os.environ["PERDURE_NODE"].split("/")[1].rpartition("-")[2])
network, _ = json.loads((folder / "placement").read_text())[1][node]
skewed = folder / f"skew-{node}"
if skewed.exists():
    os.environ |= {"LD_PRELOAD": str(folder / "skewed_clock.so"), "FAULTS_SKEW": skewed.read_text()}
command = ["nsenter", f"--net=/run/netns/{network}", "--", sys.executable, "-P", "-m", sys.argv[1]]
os.execvp(command[0], command)
