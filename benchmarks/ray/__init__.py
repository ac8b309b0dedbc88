"""Recoveries on a Ray cluster, by Perdure and by Ray Train, and what many actors cost."""
