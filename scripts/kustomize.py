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


def bases(helm: Path) -> dict[Path, str]:
    """Returns the content of each file: the worker, and its rights in a namespace that jobs run in."""
    command = [helm, "template", "perdure", DEPLOY / "helm" / "perdure", "--namespace", "perdure"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = [part.strip() for part in _HELM_S_OWN.sub("", text).split("---\n") if part.strip()]
    roles = [one for one in objects if re.search(r"^kind: Role", one, flags=re.MULTILINE)]
    # Presets are read in the worker's own namespace.
    rights = [one for one in roles if not re.search(r"^  name: .*-presets$", one, flags=re.MULTILINE)]
    others = [one for one in objects if one not in rights]
    folder = DEPLOY / "kustomize"
    return {
        folder / "access" / "access.yaml": _HEAD + "\n---\n".join(rights) + "\n",
        folder / "worker" / "worker.yaml": _HEAD + "\n---\n".join(others) + "\n",
    }


if __name__ == "__main__":
    for path, content in bases(binaries.ensure(print, (binaries.HELM_SOURCE,))["helm"]).items():
        path.write_text(content, encoding="utf-8")
        print(path)
