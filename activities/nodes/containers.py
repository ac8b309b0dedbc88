"""What is where in a pod: for the backend that makes it, and for `perdure shell`, which needs no Kubernetes client."""

TRAINING = "training"
"""The container of the user's image."""

SHARED = "/perdure"
"""Shared by agent and training: the run directory, the launcher and its configuration."""

SHELL = (
    'for python in "$PERDURE_PYTHON" python3 python; do command -v "$python" >/dev/null 2>&1 && '
    f'exec "$python" {SHARED}/lib shell "$@"; done; [ $# -gt 0 ] || set -- sh; exec "$@"'
)
"""For `/bin/sh -c` in the training container: a shell in the command's folder with its environment, or the command that
the arguments are; a bare one where the launcher's Python is not found."""
