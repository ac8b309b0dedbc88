"""Encryption of what Temporal stores: the keys, the payload codec, and the codec server for Temporal's own tools."""
