"""The README's pictures, from real runs: the steps of the same job under the same faults, and a terminal."""
