"""Inside the training container: starts the user's command, owns all that descends from it, and forms its worlds.

The package is copied into users' images under this one name, and runs with whatever Python they hold. So it needs
nothing but the standard library, and torch only in the modules that torch itself loads (`steps`, `rendezvous`).
"""

__version__ = "0.2.0"
