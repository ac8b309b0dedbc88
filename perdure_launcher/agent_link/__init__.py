"""The launcher's connection to its node's agent: reports that must arrive, and the desired state."""
