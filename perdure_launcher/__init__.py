"""The launcher, which runs inside the training container: starts the user's command, owns all its descendants, and
forms its worlds.

The package is copied into users' images under this one name, and runs with their Python. So it needs only the standard
library, and torch only in the modules that torch itself loads (`rank_plugins`, `rendezvous`).
"""

__version__ = "0.3.0"
