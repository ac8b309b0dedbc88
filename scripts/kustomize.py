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
_OF_OPERATOR = re.compile(r"^    app\.kubernetes\.io/component: operator$", flags=re.MULTILINE)
_OF_PAGE = re.compile(r"^    app\.kubernetes\.io/component: page$", flags=re.MULTILINE)


def bases(helm: Path) -> dict[Path, str]:
    """Returns the content of each file: worker and gateway; what a namespace needs in which jobs run, that is the
    worker's rights, and the network policy of jobs; and operator and page for all namespaces."""
    objects = _rendered(helm)
    access = [one for one in objects if _OF_JOBS.search(one)]
    others = [one for one in objects if one not in access]
    everywhere = _rendered(helm, "--set", "operator.enabled=true,page.enabled=true,allNamespaces=true")
    operator = [one for one in everywhere if _OF_OPERATOR.search(one)]
    page = [one for one in everywhere if _OF_PAGE.search(one)]
    folder = DEPLOY / "kustomize"
    files = {
        "access/access.yaml": access,
        "worker/worker.yaml": others,
        "operator/operator.yaml": operator,
        "page/page.yaml": page,
    }
    return {folder / path: _HEAD + "\n---\n".join(content) + "\n" for path, content in files.items()}


def _rendered(helm: Path, *options: str) -> list[str]:
    # Hooks are Helm's own: without it, the first gateway makes the key ring.
    chart = DEPLOY / "helm" / "perdure"
    command = [helm, "template", "perdure", chart, "--namespace", "perdure", "--no-hooks", *options]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [part.strip() for part in _HELM_S_OWN.sub("", text).split("---\n") if part.strip()]


if __name__ == "__main__":
    for path, content in bases(binaries.ensure(print, (binaries.HELM_SOURCE,))["helm"]).items():
        path.write_text(content, encoding="utf-8")
        print(path)
