"""Random, overlapping faults on programs that know nothing of Perdure: checks that they end with the right results."""
