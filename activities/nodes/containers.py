"""Names and paths in a node's pod, shared by the backend and by `perdure shell`, which needs no Kubernetes client."""

TRAINING = "training"
"""The name of the container with the user's image."""

SHARED = "/perdure"
"""The folder that agent and training container share: the run directory, the launcher and its configuration."""

SHELL = (
    'for python in "$PERDURE_PYTHON" python3 python; do command -v "$python" >/dev/null 2>&1 && '
    f'exec "$python" {SHARED}/lib shell "$@"; done; [ $# -gt 0 ] || set -- sh; exec "$@"'
)
"""Script for `/bin/sh -c` in the training container: opens a shell in the command's folder with its environment, or
runs its arguments there as a command. If the launcher's Python is not found, it opens a plain shell."""
