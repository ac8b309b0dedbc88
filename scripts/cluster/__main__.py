"""`python -m scripts.cluster up | down | binaries`: the entry point of `make cluster`, `make cluster-down` and CI."""

from __future__ import annotations

import sys

from scripts.cluster import binaries
from scripts.cluster.cluster import BinariesMissing, Cluster, ClusterUnavailable


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str]) -> int:
    """Runs the subcommand that the single argument names."""
    try:
        match arguments:
            case ["up"]:
                cluster = Cluster()
                cluster.up(_say, keep=True)
                _say(f"export KUBECONFIG={cluster.kubeconfig}")
            case ["down"]:
                for leftover in (left := Cluster().down()):
                    _say(f"cluster: could not be removed: {leftover}")
                return 1 if left else 0
            case ["binaries"]:
                for name, path in sorted(binaries.ensure(_say).items()):
                    _say(f"{name}: {path}")
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except (BinariesMissing, ClusterUnavailable, RuntimeError, TimeoutError) as problem:
        print(f"cluster: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
