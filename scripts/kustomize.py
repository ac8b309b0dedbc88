"""`python -m scripts.kustomize`: generates the bases in deploy/kustomize from the Helm chart, the single source of
both.

Users who deploy without Helm read and patch these files, so they are kept as text, with comments.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from scripts.cluster import binaries

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"

_HEAD = "# Generated from the Helm chart by `make kustomize`.\n"
_HELM_S_OWN = re.compile(r"^(# Source: .*| *(app\.kubernetes\.io/managed-by|helm\.sh/chart): .*)\n", flags=re.MULTILINE)

_OF_JOBS = re.compile(r"^  name: perdure-jobs-", flags=re.MULTILINE)
"""What the chart makes in each namespace of jobs, by its name."""


def bases(helm: Path) -> dict[Path, str]:
    """Returns the content of each file: worker and gateway; and what a namespace needs in which jobs run, that is the
    worker's rights, and the network policy of jobs."""
    command = [helm, "template", "perdure", DEPLOY / "helm" / "perdure", "--namespace", "perdure"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = [part.strip() for part in _HELM_S_OWN.sub("", text).split("---\n") if part.strip()]
    access = [one for one in objects if _OF_JOBS.search(one)]
    others = [one for one in objects if one not in access]
    folder = DEPLOY / "kustomize"
    return {
        folder / "access" / "access.yaml": _HEAD + "\n---\n".join(access) + "\n",
        folder / "worker" / "worker.yaml": _HEAD + "\n---\n".join(others) + "\n",
    }


if __name__ == "__main__":
    for path, content in bases(binaries.ensure(print, (binaries.HELM_SOURCE,))["helm"]).items():
        path.write_text(content, encoding="utf-8")
        print(path)
