"""Checkpoints in storage: when one is complete, which are trusted, and where copies of unsaved ones are."""
