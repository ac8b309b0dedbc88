"""A module beside the script, which its owner may change at any time."""
